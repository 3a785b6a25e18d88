"""What `hal-attn bench kernels` measures: every backend on every shape, and whether the best of them is chosen."""
