"""Every backend on a real AMD device against the oracle: `pytest -m rocm tests/rocm/test_hardware.py` on the machine.

Without a device it fails: who asks for this run wants to know. In an ordinary run it is not collected (conftest).
"""

import pytest
import torch
from hal_attn_rocm.platform import RocmPlatform

from hal_attn import attention, explain, varlen_attention
from tests.support import assert_close_to_oracle, dense, expected, packed, randn

pytestmark = pytest.mark.rocm
BACKENDS = [backend.name for backend in RocmPlatform().backends()]
CALLS = [
    {},
    {"causal": True},
    {"window_size": (0, 0)},
    {"window_size": (40, 8)},
    {"softcap": 2.0},
    {"sinks": randn(8, seed=5)},
    {"alibi_slopes": randn(8, seed=6).abs()},
    {"scale": 0.2},
    {"mask": randn(1, 1, 200, 300, seed=7) > 0},
]


@pytest.fixture(scope="module", autouse=True)
def _device():
    found = RocmPlatform().detect()
    assert found.available, f"{found.reason}; {found.remedy}"


def on_device(value):
    return value.to("cuda") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("lengths", [(200, 300), (300, 300), (300, 200)])
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("options", CALLS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("is_packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend, is_packed, options, head_dim, lengths, dtype, record_property):
    shape = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    if "mask" in options and (is_packed or lengths != (200, 300)):
        options = {}
    if is_packed:
        query, key, value, sequences = packed([lengths[0], 7], [lengths[1], 30], **shape)
        right = expected(query, key, value, sequences=sequences, device="cuda", **options)
        given = {"sequences": sequences}
    else:
        query, key, value = dense(2, *lengths, **shape)
        right, given = expected(query, key, value, device="cuda", **options), {}
    given |= {name: on_device(option) for name, option in options.items()}
    function = varlen_attention if is_packed else attention
    inputs = tuple(on_device(tensor) for tensor in (query, key, value))
    considered = {each.backend.name: each.refusals for each in explain(*inputs, **given).considered}
    if refusals := considered[backend]:
        record_property("refused", "; ".join(map(str, refusals)))
        return
    output = function(*inputs, backend=backend, **given).cpu()
    assert_close_to_oracle(output, right.output, right.plain_output, f"{backend}: output")
    asked = {each.backend.name: each.refusals for each in explain(*inputs, return_lse=True, **given).considered}
    if not asked[backend]:
        _, lse = function(*inputs, backend=backend, return_lse=True, **given)
        assert_close_to_oracle(lse.cpu(), right.lse, right.plain_lse, f"{backend}: LSE")
    leaves = tuple(tensor.requires_grad_() for tensor in inputs)
    asked = {each.backend.name: each.refusals for each in explain(*leaves, **given).considered}
    if not asked[backend]:
        loss = (function(*leaves, backend=backend, **given) * on_device(right.weight)).sum()
        found = torch.autograd.grad(loss, leaves)
        largest = max(gradient.abs().max().item() for gradient in right.gradients)
        for have, exact, plain in zip(found, right.gradients, right.plain_gradients, strict=True):
            assert_close_to_oracle(have.cpu(), exact, plain, f"{backend}: gradient", largest_gradient=largest)
