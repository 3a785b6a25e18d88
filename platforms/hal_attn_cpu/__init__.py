"""The CPU: PyTorch's own kernels, and attention in plain PyTorch for everything that they refuse."""
