"""Backends that run on more than one vendor's devices: PyTorch's own attention, and libraries built for several."""
