"""Rows of the operator by itself: inputs, times, errors, the fused form, tuning; their reports."""
