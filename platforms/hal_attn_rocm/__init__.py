"""AMD: AITER, FlashAttention and PyTorch's own attention on ROCm devices."""
