"""MSDA kernels in CUDA C++, compiled at run time."""
