"""Reference agents in Flax; each is read top to bottom."""
