"""Cheapest one-to-one assignment of many small problems at once."""

from ops.assignment.functional import assign, assign_runs_on

__all__ = ["assign", "assign_runs_on"]
