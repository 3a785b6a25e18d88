"""What `hal-attn bench dispatch` measures: the time of one call on the host, beyond the bare call it ends in."""
