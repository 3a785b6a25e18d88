"""What torch_npu's own dispatcher, autograd and meta kernels do with the calls that an adapter makes."""

import subprocess
import sys

import pytest
import torch
import torch_npu

from tests.vendors import signatures
from tests.vendors.ascend_contract.kernels import through_vendor_autograd

OPERATORS = [id for id, function in signatures.functions().items() if function.package == "torch-npu"]
FUSION = "torch_npu.npu_fusion_attention"
GRAD = "torch_npu.npu_fusion_attention_grad"
QUERY_HEADS, KEY_HEADS, BATCH, QUERIES, KEYS, SIZE, VALUE_SIZE = 8, 2, 2, 5, 7, 64, 32
SHAPES = {
    "BSND": lambda length, heads, size: (BATCH, length, heads, size),
    "BNSD": lambda length, heads, size: (BATCH, heads, length, size),
    "TND": lambda length, heads, size: (BATCH * length, heads, size),
}


class Kernel:
    """Answers calls with a value, and remembers them bound to the vendor's signature."""

    def __init__(self, id, answer):
        self.id, self.answer, self.calls = id, answer, []

    def __call__(self, *args, **kwargs):
        self.calls.append(signatures.bind(self.id, args, kwargs).arguments)
        return self.answer(*args, **kwargs)


def fusion(query, key, value, head_num, input_layout, *rest):
    """Values of the right shape for TND, the numbers 11, 22 and 33 for seed, offset and numels."""
    statistics = torch.full((query.shape[0], head_num, 8), 2.0)
    return torch.full_like(query, 5.0), statistics, statistics + 1, torch.empty(0), 11, 22, 33


def fusion_grad(query, key, value, dy, *rest, sink=None, **options):
    """1, 2, 3 and 4 as the gradients of query, key, value and sink; none for pse."""
    sink_grad = torch.empty(0) if sink is None else torch.full_like(sink, 4.0)
    return torch.full_like(query, 1.0), torch.full_like(key, 2.0), torch.full_like(value, 3.0), None, sink_grad


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


@pytest.fixture
def autograd(library):
    """Both kernels of `npu_fusion_attention`, joined by torch_npu's autograd."""
    kernels = Kernel(FUSION, fusion), Kernel(GRAD, fusion_grad)
    through_vendor_autograd(library, *kernels)
    return kernels


def meta_tensors(layout):
    shape = SHAPES[layout]
    return tuple(
        torch.empty(shape(*sizes), dtype=torch.float16, device="meta")
        for sizes in ((QUERIES, QUERY_HEADS, SIZE), (KEYS, KEY_HEADS, SIZE), (KEYS, KEY_HEADS, VALUE_SIZE))
    )


def shapes(outputs):
    return [tuple(output.shape) if isinstance(output, torch.Tensor) else output for output in outputs]


def test_importing_torch_loads_torch_npu_without_a_device():
    code = "import sys, torch; print('torch_npu' in sys.modules, torch.npu.is_available(), torch.npu.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False 0"


@pytest.mark.parametrize("id", OPERATORS)
def test_live_schema_is_the_data(id):
    name = signatures.functions()[id].name
    assert str(getattr(torch.ops.npu, name).default._schema) == signatures.schema(id)
    assert getattr(torch_npu, name) is getattr(torch.ops.npu, name)
    assert torch_npu.__version__ == signatures.functions()[id].version


@pytest.mark.parametrize("id", OPERATORS)
def test_only_fusion_attention_has_autograd_and_only_for_npu_tensors(id):
    name = signatures.schema(id).partition("(")[0]
    keys = [
        key
        for key in ("Autograd", "AutogradCPU", "AutogradPrivateUse1", "CompositeImplicitAutograd")
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    ]
    assert keys == (["AutogradPrivateUse1"] if id == FUSION else [])


def test_cpu_kernel_is_reached_with_trailing_defaults_trimmed(library):
    received = []
    library.impl(
        "npu_fusion_attention", lambda *args, **kwargs: (received.append((args, kwargs)), fusion(*args))[1], "CPU"
    )
    query = torch.ones(5, 4, 8)
    outputs = torch_npu.npu_fusion_attention(query, query, query, head_num=4, input_layout="TND", scale=0.5)
    ((args, kwargs),) = received
    assert args[3:] == (4, "TND", None, None, None, 0.5)
    assert kwargs == {}
    assert outputs[0].unique().tolist() == [5.0]
    assert outputs[4:] == (11, 22, 33)


def test_cpu_kernel_gets_keyword_only_arguments_by_name(library):
    name = "npu_fused_infer_attention_score_v2"
    kernel = Kernel(f"torch_npu.{name}", lambda query, *rest, **options: (query + 1, torch.empty(0)))
    library.impl(name, kernel, "CPU")
    query = torch.ones(5, 4, 8)
    torch_npu.npu_fused_infer_attention_score_v2(
        query,
        query,
        query,
        num_query_heads=4,
        softmax_scale=0.5,
        input_layout="TND",
        actual_seq_qlen=[2, 5],
        sparse_mode=0,
    )
    (call,) = kernel.calls
    assert {name: value for name, value in call.items() if name not in ("query", "key", "value")} == {
        "num_query_heads": 4,
        "softmax_scale": 0.5,
        "input_layout": "TND",
        "actual_seq_qlen": [2, 5],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre_tokens": 1}, "Unknown keyword argument 'pre_tokens'"),
        ({"scale": None}, "Expected a value of type 'float' for argument 'scale'"),
        ({"actual_seq_qlen": torch.tensor([5])}, "for argument 'actual_seq_qlen' but instead found type 'Tensor'"),
    ],
)
def test_dispatcher_refuses_what_the_schema_does_not_allow(library, options, message):
    library.impl("npu_fusion_attention", fusion, "CPU")
    query = torch.ones(5, 4, 8)
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_fusion_attention(query, query, query, 4, "TND", **options)


def test_autograd_calls_the_grad_operator_with_what_the_forward_got_and_gave(autograd):
    query, key, value, sink = leaf(5, 4, 8), leaf(5, 4, 8), leaf(5, 4, 8), leaf(4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    given = {"keep_prob": 0.9, "pre_tockens": 7, "next_tockens": 0, "sparse_mode": 4, "softmax_layout": "TND"}
    lengths = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [3, 5]}
    outputs = torch_npu.npu_fusion_attention(
        query, key, value, 4, "TND", atten_mask=mask, scale=0.5, sink=sink, seed=5, offset=6, **given, **lengths
    )
    dy = torch.full_like(outputs[0], 9.0)
    outputs[0].backward(dy)
    (call,) = autograd[1].calls
    tensors = {name: call.pop(name) for name in list(call) if isinstance(call[name], torch.Tensor)}
    # The forward's scale is scale_value here; seed, offset and numels are those it returned, not those it was given.
    assert call == {
        **{"head_num": 4, "input_layout": "TND", "pse": None, "padding_mask": None, "scale_value": 0.5},
        **{"seed": 11, "offset": 22, "numels": 33},
        **given,
        **lengths,
    }
    expected = {"query": query, "key": key, "value": value, "dy": dy, "atten_mask": mask, "sink": sink}
    expected |= {"attention_in": outputs[0], "softmax_max": outputs[1], "softmax_sum": outputs[2]}
    assert set(tensors) == {*expected, "softmax_in"}
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    gradients = [tensor.grad.unique().tolist() for tensor in (query, key, value, sink)]
    assert gradients == [[1.0], [2.0], [3.0], [4.0]]


def test_gradient_of_max_and_sum_is_dropped(autograd):
    query = leaf(5, 4, 8)
    out, maximum, total, *_ = torch_npu.npu_fusion_attention(query, leaf(5, 4, 8), leaf(5, 4, 8), 4, "TND")
    # They say that they have one, so that a loss of the LSE alone runs, with no dy at all.
    assert out.requires_grad
    assert maximum.requires_grad
    (maximum + total.log()).sum().backward()
    (call,) = autograd[1].calls
    assert call["dy"] is None


def test_sink_gradient_of_another_shape_is_refused(library):
    def grad(query, key, value, *rest, **options):
        return query, key, value, None, torch.empty(0)

    through_vendor_autograd(library, fusion, grad)
    outputs = torch_npu.npu_fusion_attention(leaf(5, 4, 8), leaf(5, 4, 8), leaf(5, 4, 8), 4, "TND", sink=leaf(4))
    with pytest.raises(RuntimeError, match=r"invalid gradient at index 4 - got \[0\]"):
        outputs[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_inference_kernel_gives_no_gradient(library):
    library.impl(
        "npu_fused_infer_attention_score_v2", lambda query, *r, **o: (query.detach() + 1, torch.empty(0)), "CPU"
    )
    query = leaf(5, 4, 8)
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(query, query, query, num_query_heads=4, input_layout="TND")
    assert out.requires_grad
    out.sum().backward()
    assert query.grad is None


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.usefixtures("no_device")
def test_meta_shapes_of_fusion_attention(layout):
    query, key, value = meta_tensors(layout)
    statistics = (BATCH * QUERIES, QUERY_HEADS, 8) if layout == "TND" else (BATCH, QUERY_HEADS, QUERIES, 8)
    outputs = torch_npu.npu_fusion_attention(query, key, value, QUERY_HEADS, layout)
    out = SHAPES[layout](QUERIES, QUERY_HEADS, VALUE_SIZE)
    assert shapes(outputs) == [out, statistics, statistics, (0,), 0, 0, 0]
    assert [output.dtype for output in outputs[:3]] == [torch.float16, torch.float32, torch.float32]
    gradients = torch_npu.npu_fusion_attention_grad(query, key, value, query, QUERY_HEADS, layout)
    assert shapes(gradients) == [tuple(query.shape), tuple(key.shape), tuple(value.shape), None, (0,)]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("version", [1, 2])
def test_meta_shapes_of_fused_infer(layout, version, lse):
    query, key, value = meta_tensors(layout)
    options = {"input_layout": layout, "num_key_value_heads": KEY_HEADS}
    ends = [QUERIES, BATCH * QUERIES], [KEYS, BATCH * KEYS]
    if version == 1:
        options |= {"num_heads": QUERY_HEADS, "softmax_lse_flag": lse}
        options |= dict(zip(("actual_seq_lengths", "actual_seq_lengths_kv"), ends, strict=True))
        outputs = torch_npu.npu_fused_infer_attention_score(query, key, value, **options)
    else:
        options |= {"num_query_heads": QUERY_HEADS, "return_softmax_lse": lse}
        options |= dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
        outputs = torch_npu.npu_fused_infer_attention_score_v2(query, key, value, **options)
    statistics = (BATCH * QUERIES, QUERY_HEADS, 1) if layout == "TND" else (BATCH, QUERY_HEADS, QUERIES, 1)
    assert shapes(outputs) == [SHAPES[layout](QUERIES, QUERY_HEADS, VALUE_SIZE), statistics if lse else (0,)]
    assert [output.dtype for output in outputs] == [torch.float16, torch.float32]


@pytest.mark.parametrize("update_type", [0, 1])
def test_meta_shapes_of_attention_update(update_type):
    lse, out = torch.empty(40, device="meta"), torch.empty(40, SIZE, device="meta")
    outputs = torch_npu.npu_attention_update([lse, lse], [out, out], update_type)
    assert shapes(outputs) == [(40, SIZE), (40,)]
