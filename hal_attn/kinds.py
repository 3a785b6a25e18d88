"""Arguments of a kind that their parameter never takes, told by type alone: what a tracer can already see.

Each function answers with what is wrong, as the parts of an `InvalidAttentionInputError`, or None. None of them raises,
because a tracer cannot follow an error of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hal_attn.packing import PackedSequences

Fault = tuple[str, str, str, str]

DENSE = ("[B, Sq, H, D]", "[B, Sk, Hkv, D]", "[B, Sk, Hkv, Dv]")
PACKED = ("[Tq, H, D]", "[Tk, Hkv, D]", "[Tk, Hkv, Dv]")
SCALES = "a finite number, or None for 1/sqrt(D)"
SOFTCAPS = "a finite number of at least 0; 0.0 is off"
PROBABILITIES = "a probability of dropping, at least 0 and below 1"
WINDOWS = "None, or (left, right) of whole numbers of at least 0, where -1 or None is unlimited"
OFFSETS = "a 1-D int32 or int64 tensor of cumulative lengths, starting at 0"
LENGTHS = "a whole number of at least 0, on the host"
_OPTION_LAYOUTS = {
    "mask": "broadcastable to [B, H, Sq, Sk]",
    "key_padding_mask": "[B, Sk]",
    "sinks": "[H]",
    "alibi_slopes": "[H] or [B, H]",
}


def fault_of_call(tensors: Sequence[object], layouts: Sequence[str], options: Mapping[str, object]) -> Fault | None:
    """Of query, key, value and the options of a call, the first argument of a wrong kind."""
    found: list[Fault | None] = [
        tensor(name, value, f"a torch.Tensor {layout}")
        for name, value, layout in zip(("query", "key", "value"), tensors, layouts, strict=True)
    ]
    for name, layout in _OPTION_LAYOUTS.items():
        if options.get(name) is not None:
            found.append(tensor(name, options[name], f"a torch.Tensor {layout}"))
    for name in ("causal", "deterministic", "return_lse"):
        found.append(flag(name, options.get(name, False)))
    if options.get("scale") is not None:
        found.append(number("scale", options["scale"], SCALES))
    found.append(number("softcap", options.get("softcap", 0.0), SOFTCAPS))
    found.append(number("dropout_p", options.get("dropout_p", 0.0), PROBABILITIES))
    found.append(window(options.get("window_size")))
    found.append(names(options.get("backend")))
    for fault in found:
        if fault is not None:
            return fault
    return None


def fault_of_offsets(sequences: object, offsets: Mapping[str, object]) -> Fault | None:
    """Of what says where packed sequences lie, the first argument of a wrong kind."""
    if sequences is not None and not isinstance(sequences, PackedSequences):
        remedy = "PackedSequences.from_lengths(lengths)"
        return ("sequences", f"a {type(sequences).__name__}", "a PackedSequences", remedy)
    if sequences is None and offsets["cu_seqlens"] is None:
        return ("cu_seqlens", "None", "offsets, or sequences=PackedSequences", "")
    for name, value in offsets.items():
        if value is None or isinstance(value, Tensor):
            continue
        if name in ("cu_seqlens", "cu_seqlens_k"):
            remedy = "host offsets go in PackedSequences.from_lengths(lengths)"
            return (name, f"a {type(value).__name__}", OFFSETS, remedy)
        fault = _longest(name, value) if name in ("max_seqlen", "max_seqlen_k") else _host(name, value)
        if fault is not None:
            return fault
    return None


def _longest(name: str, value: object) -> Fault | None:
    """Anything but a whole number."""
    return None if _whole(value) else (name, repr(value), LENGTHS, "int(...) reads a tensor")


def _host(name: str, value: object) -> Fault | None:
    if not isinstance(value, (tuple, list)):
        return (name, repr(value), "offsets: a tuple or list of whole numbers", "")
    return None if all(_whole(number) for number in value) else (name, str(tuple(value)), "whole numbers", "")


def tensor(name: str, value: object, allowed: str) -> Fault | None:
    """Anything but a tensor."""
    return None if isinstance(value, Tensor) else (name, f"a {type(value).__name__}", allowed, "")


def flag(name: str, value: object) -> Fault | None:
    """Anything but True and False."""
    return None if isinstance(value, bool) else (name, repr(value), "True or False", "")


def number(name: str, value: object, allowed: str) -> Fault | None:
    """Anything but a number of the host."""
    if isinstance(value, Tensor):
        remedy = "take its value on the host; reading it here would wait for the device"
        return (name, f"a {type(value).__name__}", allowed, remedy)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return (name, repr(value), allowed, "")
    return None


def window(value: object) -> Fault | None:
    """Anything but two edges, or none."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(edge is None or _whole(edge) for edge in value):
        return None
    return ("window_size", repr(value), WINDOWS, "")


def names(value: object) -> Fault | None:
    """Anything but the name of a backend, names in order, or none."""
    if value is None or (isinstance(value, str) and value):
        return None
    if isinstance(value, (tuple, list)) and value and all(isinstance(name, str) for name in value):
        return None
    return ("backend", repr(value), "a backend's name, names in order, or None", "")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
