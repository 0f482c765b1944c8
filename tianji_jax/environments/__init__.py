"""Environments behind one small interface."""
