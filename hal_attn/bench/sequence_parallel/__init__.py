"""What `hal-attn bench sequence-parallel` measures: every way of sharing a problem among ranks, and peers."""
