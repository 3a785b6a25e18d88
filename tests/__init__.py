"""Tests of hal_attn and of its platforms; the folders mirror the two trees."""
