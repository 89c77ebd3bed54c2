"""The MSDA operator, from the module at the top to the backends at the bottom."""
