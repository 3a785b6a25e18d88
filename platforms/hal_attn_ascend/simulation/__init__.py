"""Ascend without an NPU: torch_npu's attention operators on the CPU, under their own schemas, rules and pitfalls."""
