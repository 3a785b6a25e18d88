"""A real sentence encoder over real text, run packed through `hal_attn` and padded as its authors run it."""
