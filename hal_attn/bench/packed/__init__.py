"""What `hal-attn bench packed` measures: packed batches on a backend that knows only batches."""
