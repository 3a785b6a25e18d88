"""Tests against the real torch_npu, run by `ci/ascend_contract/environment.py` in an environment of their own."""
