"""Asynchronous deep reinforcement learning on JAX."""
