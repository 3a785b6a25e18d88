"""Acme accelerators for hal_attn."""
