"""Cheapest one-to-one assignment of many small problems at once."""

from ops.assignment.functional import assign

__all__ = ["assign"]
