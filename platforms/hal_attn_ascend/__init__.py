"""Huawei Ascend: finds its devices, and runs attention on them through torch_npu's operators."""
