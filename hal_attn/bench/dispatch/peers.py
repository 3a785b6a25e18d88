"""The dispatch of diffusers and transformers on the same inputs, where they are installed; with kernels of PyTorch, and
with one that does nothing, given to them by their own means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hal_attn.bench.dispatch.calls import BARE_NOTHING, BARE_SDPA, LENGTHS, NOTHING, SDPA, Timed, tiny
from hal_attn.guard import attempt

DIFFUSERS_UNCHECKED = "diffusers, unchecked, nothing"


@contextmanager
def opened(device: torch.device) -> Iterator[tuple[list[Timed], list[str]]]:
    """The calls of the peers that are installed, and of the others why they are not here."""
    found: list[Timed] = []
    notes: list[str] = []
    with ExitStack() as stack:
        for name, make in (("diffusers", _diffusers), ("transformers", _transformers)):
            try:
                found += stack.enter_context(make(device))
            except ImportError as error:
                absent = isinstance(error, ModuleNotFoundError) and error.name == name
                why = f"not installed; pip install {name}" if absent else f"broken: {error}"
                notes.append(f"{name}: {why}")
            except (AttributeError, TypeError) as error:
                notes.append(f"{name}: another version than this bench knows ({type(error).__name__}: {error})")
        working = []
        for timed in found:
            failure = attempt(partial(_once, timed), None)[1]
            if failure:
                notes.append(f"{timed.name}: failed: {failure}")
            else:
                working.append(timed)
        yield working, notes


def _once(timed: Timed) -> None:
    with torch.no_grad(), timed.around():
        timed.call()


@contextmanager
def _diffusers(device: torch.device) -> Iterator[list[Timed]]:
    """`dispatch_attention_fn` as it is, and with one of its backends replaced for the time being."""
    module: Any = import_module("diffusers.models.attention_dispatch")

    registry: Any = module._AttentionBackendRegistry
    dispatch: Callable[..., object] = module.dispatch_attention_fn
    names = module.AttentionBackendName
    query, key, value = tiny(device)
    on_cpu = tiny(torch.device("cpu"))

    @contextmanager
    def checks(enabled: bool) -> Iterator[None]:
        before, registry._checks_enabled = registry._checks_enabled, enabled
        try:
            yield
        finally:
            registry._checks_enabled = before

    tables = (registry._backends, registry._constraints, registry._supported_arg_names)
    kept = [table.get(names._NATIVE_MATH) for table in tables]
    registry.register(names._NATIVE_MATH, constraints=registry._constraints[names.NATIVE])(_nothing_for_diffusers)
    unchecked, checked = partial(checks, False), partial(checks, True)

    def call() -> object:
        return dispatch(query, key, value, backend=names.NATIVE)

    def call_nothing() -> object:
        return dispatch(*on_cpu, backend=names._NATIVE_MATH)

    try:
        yield [
            Timed("diffusers, unchecked", SDPA, call, BARE_SDPA, around=unchecked),
            Timed("diffusers, checked", SDPA, call, BARE_SDPA, around=checked),
            Timed(DIFFUSERS_UNCHECKED, NOTHING, call_nothing, BARE_NOTHING, around=unchecked),
            Timed("diffusers, checked, nothing", NOTHING, call_nothing, BARE_NOTHING, around=checked),
        ]
    finally:
        for table, before in zip(tables, kept, strict=True):
            if before is None:
                table.pop(names._NATIVE_MATH, None)
            else:
                table[names._NATIVE_MATH] = before


def _nothing_for_diffusers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> Tensor:
    """With the parameters of its own kernel: it leaves out what a kernel has no parameter for."""
    return value


@contextmanager
def _transformers(device: torch.device) -> Iterator[list[Timed]]:
    """Its SDPA function, and its FlashAttention function over a stand-in for FlashAttention 3."""
    utils: Any = import_module("transformers.modeling_flash_attention_utils")
    flash_attention_forward = import_module("transformers.integrations.flash_attention").flash_attention_forward
    sdpa_attention_forward = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward

    heads_first = tuple(tensor.transpose(1, 2) for tensor in tiny(device))
    # In float32 it would look for a dtype that FlashAttention takes.
    halves = tuple(tensor.transpose(1, 2).to(torch.bfloat16) for tensor in tiny(torch.device("cpu")))
    layer: Any = torch.nn.Module().eval()
    layer.num_key_value_groups, layer.is_causal, layer.layer_idx = 1, False, 0
    layer.config = SimpleNamespace(_attn_implementation="flash_attention_3")
    tokens = sum(LENGTHS)
    offsets = torch.tensor([0, LENGTHS[0], tokens], dtype=torch.int32)
    longest = max(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, :2] = 0

    def sdpa() -> object:
        return sdpa_attention_forward(layer, *heads_first, None)

    def flash(mask: Tensor | None = None, **options: Any) -> object:
        return flash_attention_forward(layer, *halves, mask, **options)

    packed: dict[str, Any] = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    timed = partial(Timed, group=NOTHING, over=BARE_NOTHING)
    with _stand_in(utils):
        yield [
            Timed("transformers, SDPA", SDPA, sdpa, BARE_SDPA),
            timed("transformers, flash, nothing", call=flash),
            timed("transformers, flash, offsets, nothing", call=lambda: flash(**packed)),
            timed("transformers, flash, position ids, nothing", call=lambda: flash(position_ids=positions)),
            timed("transformers, flash, padding mask, nothing", call=lambda: flash(mask)),
        ]


@contextmanager
def _stand_in(utils: Any) -> Iterator[None]:
    """A module under the name that it imports FlashAttention 3 by, whose functions do nothing: there only while it is
    imported, because our own backend of FlashAttention 3 is found by that name too."""
    name = "flash_attn_interface"
    module: Any = ModuleType(name)
    module.flash_attn_func, module.flash_attn_varlen_func = _nothing_for_flash, _nothing_for_packed_flash
    module.flash_attn_with_kvcache = None
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        utils.lazy_import_flash_attention("flash_attention_3")
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
    try:
        yield
    finally:
        # So that the next call imports the real one.
        utils._loaded_implementation = None


def _nothing_for_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    return v


def _nothing_for_packed_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    return v
