"""Measurements, apart from the command line that asks for them: `hal-attn bench`."""
