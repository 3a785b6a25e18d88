"""Where libraries are found, what their builds say, and what PyTorch puts behind its own operator."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hal_attn_cuda.backends import INSTALLED
from hal_attn_cuda.flash_attn_3 import FlashAttention3Backend, import_flash_attn_3
from hal_attn_cuda.platform import CudaPlatform
from hal_attn_cuda.simulated.flash_attn_3 import simulated_flash_attn_3
from torch.nn import attention as torch_attention

from hal_attn import attention, explain
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.kernels import KernelCall
from hal_attn.portable.aten_flash import TorchFlashBackend
from hal_attn.portable.flash_attn import FlashAttentionBackend, import_flash_attn
from hal_attn.simulation.aten import simulated_aten
from tests.absent import hide_vendor_packages
from tests.cuda.calls import batched
from tests.vendors.signatures import signature

FUNCTIONS = {"flash_attn_func": print, "flash_attn_varlen_func": print}


def module(monkeypatch, name, **attributes):
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch):
    """A test starts without any vendor's package, and puts there what it is about."""
    hide_vendor_packages(monkeypatch)


def test_backends_are_made_once_and_import_nothing(monkeypatch):
    for kind in INSTALLED:
        monkeypatch.setattr(kind, "library", property(lambda self: pytest.fail("a library was loaded")))
    platform = CudaPlatform()
    names = [backend.name for backend in platform.backends()]
    assert platform.backends() is platform.backends()
    assert names == [
        "flash_attn_3",
        "flash_attn_4",
        "flash_attn",
        "flashinfer_cudnn",
        "torch_cudnn",
        "torch_flash",
        "torch_efficient",
        "torch_math",
    ]


@pytest.mark.parametrize("name", ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"])
def test_flash_attention_3_is_found_under_each_name(monkeypatch, name):
    if "." in name:
        module(monkeypatch, "flash_attn_3")
    module(monkeypatch, name, **FUNCTIONS)
    assert import_flash_attn_3().module.flash_attn_func is print


def test_its_config_says_what_was_left_out(monkeypatch):
    module(monkeypatch, "fa3_fwd_interface", **FUNCTIONS)
    flags = {"FLASHATTENTION_DISABLE_HDIM256": True, "FLASHATTENTION_DISABLE_LOCAL": True}
    module(monkeypatch, "fa3_fwd_config", CONFIG={"build_flags": flags})
    library = import_flash_attn_3()
    assert (library.name, library.max_head_dim) == ("fa3-fwd", 192)
    assert library.lacks("LOCAL")
    assert not library.lacks("BACKWARD")


def operator_with(*parameters):
    arguments = [SimpleNamespace(name=name) for name in parameters]
    return SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))


def test_fa3_fwd_s_operator_is_called_where_it_has_what_is_given(monkeypatch):
    names = list(signature("torch.ops.fa3_fwd.fwd").parameters)
    known = operator_with(*names)
    module(monkeypatch, "fa3_fwd_interface", **FUNCTIONS, fa3_fwd_cuda=SimpleNamespace(fwd=known))
    assert import_flash_attn_3().operator is known.default
    for missing in ("num_splits", "cu_seqlens_q", "window_size_right"):
        other = operator_with(*(name for name in names if name != missing))
        module(monkeypatch, "fa3_fwd_interface", **FUNCTIONS, fa3_fwd_cuda=SimpleNamespace(fwd=other))
        assert import_flash_attn_3().operator is None
    module(monkeypatch, "fa3_fwd_interface", **FUNCTIONS)
    assert import_flash_attn_3().operator is None


def test_what_the_operator_cannot_take_goes_to_the_functions(monkeypatch):
    """Gradients, and tensors that are more than their values."""
    library, called = simulated_flash_attn_3("fa3_fwd", "sm90"), []
    for name in FUNCTIONS:
        function = getattr(library.module, name)
        monkeypatch.setattr(library.module, name, lambda *a, f=function, **o: called.append(f) or f(*a, **o))
    backend = FlashAttention3Backend(lambda: library, lambda device: "sm90")
    call = KernelCall(scale=0.25)
    (query, key, value), _ = batched(7, 11)
    plain = backend.run(query, key, value, call)[0]
    assert not called
    as_parameter = torch.nn.Parameter(key, requires_grad=False)
    torch.testing.assert_close(backend.run(query, as_parameter, value, call)[0], plain)
    assert len(called) == 1
    wanting = value.clone().requires_grad_()
    assert backend.run(query, key, wanting, call)[0].requires_grad
    assert len(called) == 2
    with torch.no_grad():
        backend.run(query, key, wanting, call)
    assert len(called) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_functions_are_told_to_be_deterministic_and_the_operator_to_make_one_split(monkeypatch, deterministic):
    (query, key, value), _ = batched(7, 11)
    call, told = KernelCall(scale=0.25, deterministic=deterministic), []
    full = simulated_flash_attn_3("full", "sm90")
    function = full.module.flash_attn_func
    monkeypatch.setattr(
        full.module, "flash_attn_func", lambda *a, **o: told.append(o["deterministic"]) or function(*a, **o)
    )
    FlashAttention3Backend(lambda: full, lambda device: "sm90").run(query, key, value, call)
    wheel = simulated_flash_attn_3("fa3_fwd", "sm90")

    def operator(*arguments, **options):
        told.append(options["num_splits"])
        return wheel.operator(*arguments, **options)

    recorded = replace(wheel, operator=operator)
    FlashAttention3Backend(lambda: recorded, lambda device: "sm90").run(query, key, value, call)
    assert told == [deterministic, 1]


def test_flash_attention_3_that_is_nowhere():
    reason = FlashAttention3Backend(import_flash_attn_3, lambda device: "sm90").unavailable()
    assert reason is not None
    assert "flash-attn-3" in str(reason)
    assert "fa3-fwd" in str(reason)


def test_flash_attention_4_alone_is_not_flash_attention_2(monkeypatch):
    module(monkeypatch, "flash_attn")
    with pytest.raises(ImportError, match="flash_attn_func"):
        import_flash_attn()
    reason = FlashAttentionBackend(import_flash_attn, lambda device: "sm90").unavailable()
    assert reason is not None
    assert reason.have == "flash-attn is not installed"


def test_older_flash_attention_2_has_no_softcap(monkeypatch):
    old = SimpleNamespace(flash_attn_func=lambda q, k, v, dropout_p=0.0: q)
    backend = FlashAttentionBackend(lambda: old, lambda device: "sm90")
    tensors, _ = batched(7, 11)
    request = explain(*tensors, softcap=1.0).request
    assert [refusal.rule for refusal in backend.refusals(request)] == ["softcap"]


def test_pytorch_without_the_operator():
    backend = TorchFlashBackend(SimpleNamespace, lambda device: "sm90")
    assert torch.__version__ in str(backend.unavailable())


@pytest.fixture
def swap(monkeypatch):
    """Says what PyTorch has behind its operator, as `activate_flash_attention_impl` does."""
    return lambda name: monkeypatch.setattr(
        torch_attention, "current_flash_attention_impl", lambda: name, raising=False
    )


@pytest.mark.parametrize(
    ("active", "device", "options", "rule"),
    [
        ("FA3", "sm90", {"dropout_p": 0.1}, "dropout_p"),
        ("FA4", "sm90", {"dropout_p": 0.1}, "dropout_p"),
        ("FA3", "sm80", {}, "device"),
        ("FA4", "sm120", {}, "device"),
        ("FA4", "sm100", {"head_dim": 160}, "head_dim"),
    ],
)
def test_swapped_kernel_refuses_what_it_lacks(swap, simulate, active, device, options, rule):
    simulate(device)
    tensors, options = batched(7, 11, **options)
    backend = TorchFlashBackend(simulated_aten, lambda d: device)
    request = explain(*tensors, **options).request
    assert backend.refusals(request) == ()
    swap(active)
    reasons = backend.refusals(request)
    assert [reason.rule for reason in reasons] == [rule]
    assert active in str(reasons[0])


def test_swap_after_binding_is_seen(swap, simulate):
    simulate()
    tensors, _ = batched(64, 64)
    options = {"dropout_p": 0.1, "backend": "torch_flash"}
    attention(*tensors, **options)
    swap("FA3")
    with pytest.raises(UnsupportedAttentionError, match="FA3 was activated"):
        attention(*tensors, **options)
    swap(None)
    attention(*tensors, **options)


def test_device_older_than_the_build(monkeypatch, simulate):
    simulate()
    platform = CudaPlatform()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_90"])
    tensors, _ = batched(7, 11)
    request = explain(*tensors).request
    for capability, rules in (((6, 1), ["device"]), ((7, 5), []), ((12, 0), [])):
        platform._architectures.clear()
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, have=capability: have)
        assert [refusal.rule for refusal in platform.validate(request)] == rules
