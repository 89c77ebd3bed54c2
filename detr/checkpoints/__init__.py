"""Weights of other codebases, by name."""
