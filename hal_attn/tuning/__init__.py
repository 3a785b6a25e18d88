"""Measured choices, HAL_ATTN_AUTOTUNE: classes of calls, the race of candidates, where results are kept and shared."""
