"""`cpu_math`: attention in plain PyTorch; every option of every call."""

from __future__ import annotations

from dataclasses import replace

from hal_attn.portable.math import MathBackend


class CpuMathBackend(MathBackend):
    """`MathBackend` on the CPU, where it can look at values without waiting: a hidden NaN reaches nothing."""

    name = "cpu_math"
    capabilities = replace(MathBackend.capabilities, masked_values_ignored=True)
