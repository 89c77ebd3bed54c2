"""Measuring kernels and training steps: rows, records and reports."""
