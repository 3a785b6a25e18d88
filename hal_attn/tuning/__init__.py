"""Measured choices (HAL_ATTN_AUTOTUNE): what counts as one class of calls, how candidates race, where results are kept."""
