"""MSDA kernels in Triton."""
