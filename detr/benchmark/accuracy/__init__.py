"""Runs that differ in one setting: what they reach, with how much doubt, and how exact their gradients are."""
