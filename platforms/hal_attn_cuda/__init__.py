"""NVIDIA: its devices and the kernels of PyTorch, FlashAttention 2 to 4, cuDNN and FlashInfer, with simulations."""
