"""Rows of whole training steps: data, times, kernels, loss curves; the matrix that runs them, and its reports."""
