"""How trajectories and parameters travel."""
