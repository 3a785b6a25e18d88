"""`flash_attn_3`: FlashAttention 3, from whichever of its packages is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.guard import attempt
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel
from hal_attn.portable.flash_rules import positive_scale_rule
from hal_attn.portable.generation import compute_capability, grid_rule
from hal_attn.portable.operators import aligned, operator_parameters
from hal_attn.probing import has_parameter, versions_of
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

# By module: the package that has it, and the module with the flags that it was built with.
MODULES = {
    "flash_attn_interface": ("flash-attn-3", "flash_attn_config"),
    "flash_attn_3.flash_attn_interface": ("flash-attn-3", "flash_attn_3.flash_attn_config"),
    "fa3_fwd_interface": ("fa3-fwd", "fa3_fwd_config"),
}
DISTRIBUTIONS = tuple(dict.fromkeys(distribution for distribution, _ in MODULES.values()))
HEAD_DIMS = (64, 96, 128, 192, 256)
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class FlashAttention3:
    """The package's functions, and the features that its build left out.

    Attributes:
        module: `flash_attn_func`, `flash_attn_varlen_func` and `_flash_attn_forward`.
        flags: `build_flags` of its config; empty where it has none, which then says nothing.
        operator: what these functions call in the end, with PyTorch's own schema: (query, key, value, ...) -> (output,
            LSE, ...). None where it is not known to take what `run` gives it.
    """

    module: Any
    name: str = "flash-attn-3"
    flags: Mapping[str, bool] = field(default_factory=dict)
    operator: Callable[..., Any] | None = None

    def lacks(self, feature: str) -> bool:
        """Whether the build says that it was compiled without `feature`, as in "LOCAL"."""
        return bool(self.flags.get(f"FLASHATTENTION_DISABLE_{feature}", False))

    @property
    def max_head_dim(self) -> int:
        """The largest head dim that was compiled."""
        return max((dim for dim in HEAD_DIMS if not self.lacks(f"HDIM{dim}")), default=0)


class FlashAttention3Backend(BatchedKernel, PackedKernel):
    """`flash_attn_func` and `flash_attn_varlen_func` of FlashAttention 3 (rules read from its sources at 0251105a, from
    the copy that ships in flash-attn 2.8.3, and from fa3-fwd 0.0.3).

    Its rules: float16 and bfloat16; compute capability 9.0, and 8.x where the build says that it has it; one head dim
    of at most 256, padded to a multiple of 8; causal and windows aligned to the bottom right; softcap; no dropout, no
    ALiBi. Newer releases give the LSE with `return_attn_probs`, as a pair; older ones only by `_flash_attn_forward`.
    Its gradient is dropped. A row without keys gives LSE -inf. The backward pass is deterministic for head dims of at
    most 192.

    The packed kernel loads whole tiles of keys, those of the next sequence among them, and gives them weight 0: NaN or
    inf in one sequence reaches its neighbour, as 0 * NaN (seen with fa3-fwd 0.0.3 on an H200). Finite values do not.

    fa3-fwd is compiled without backward pass, windows, float16 and paged keys, although its signatures offer them; what
    a build left out is read from its own config and refused by name.
    """

    name = "flash_attn_3"
    install = "pip install fa3-fwd"
    head_dim_multiple = 8
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        softcap=True,
        sinks=True,
        deterministic=True,
        lse=True,
        gradients=True,
        sequences_isolated=False,
    )

    def unavailable(self) -> Refusal | None:
        try:
            _ = self.library
        except ImportError:
            if versions_of(*DISTRIBUTIONS):
                raise
            return Refusal("installed", f"none of {', '.join(DISTRIBUTIONS)} is installed", "one of them")
        return None

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        library: FlashAttention3 | None = attempt(lambda: self.library, None)[0]
        refusals = super().refusals(request)
        refusals += _device_rule(self.architecture(request.device), library)
        refusals += positive_scale_rule(request)
        if request.wants_gradient:
            # What prepares its sums counts so (`flash_bwd_launch_template.h`); the forward pass does not.
            refusals += grid_rule(request)
        dim = max(request.head_dim, request.value_head_dim)
        if request.deterministic and request.wants_gradient and dim > 192:
            refusals += (Refusal("deterministic", f"head dim {dim} with gradients", "a head dim of at most 192"),)
        return refusals if library is None else refusals + _build_rules(request, library, dim)

    def prefers_batched(self, request: AttentionRequest) -> bool:
        # On an H200 (fa3-fwd 0.0.3, bfloat16) the packed kernel took, over the same sequences: 64 of 512 1.19 times as
        # long, 20 of 1,500 1.07, one causal of 32,768 1.03, one full of 65,536 1.03 (at the limit of power; in short
        # bursts 0.99). The results were equal bit for bit.
        return True

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        module = self.library.module
        rows = [aligned(tensor, self.head_dim_multiple) for tensor in (query, key, value)]
        packed = {}
        if call.metadata is not None:
            sequences = call.metadata.sequences
            values = (*sequences.offsets(query.device), sequences.max_seqlen, sequences.max_seqlen_k)
            packed = dict(zip(_PACKED, values, strict=True))
        operator = self.library.operator
        if operator is not None and all(map(_is_plain, rows)):
            found = operator(*rows, **packed, **_operator_options(call))
            return found[0], found[1] if call.needs_lse else None
        function = module.flash_attn_func if call.metadata is None else module.flash_attn_varlen_func
        options: dict[str, Any] = {
            "softmax_scale": call.scale,
            "causal": call.right == 0,
            "window_size": (call.left, call.right),
            "softcap": call.softcap,
        }
        if not call.needs_lse:
            result = function(*rows, **packed, **options, deterministic=call.deterministic)
            return (result[0] if isinstance(result, tuple) else result), None
        if has_parameter(function, "return_attn_probs"):
            result = function(*rows, **packed, **options, deterministic=call.deterministic, return_attn_probs=True)
        else:
            # Only calls without gradients want the LSE, so the bare forward pass is enough.
            forward = module._flash_attn_forward
            result = forward(*rows, **_absent(forward, {**packed, **options}), **packed, **options)
        return result[0], result[1]


def import_flash_attn_3() -> FlashAttention3:
    """The first of the packages that imports, with what its build left out."""
    failure: ImportError | None = None
    for name, (distribution, config) in MODULES.items():
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            # Absent is no reason beside a package that is there and broken.
            failure = failure or error
            continue
        flags = getattr(attempt(partial(import_module, config), None)[0], "CONFIG", {})
        return FlashAttention3(module, distribution, flags.get("build_flags", {}), _operator(module))
    assert failure is not None
    raise failure


def _operator(module: object) -> Callable[..., Any] | None:
    """fa3-fwd's own operator, below the two that its Python functions lay around it, which take the host most of a
    short call; None for other packages, and for a release in which it has other parameters.

    It has no gradient and nothing for tensors without memory.
    """
    packet: Any = getattr(getattr(module, "fa3_fwd_cuda", None), "fwd", None)
    given = {*_PACKED, *_operator_options(KernelCall(scale=1.0))}
    return packet.default if given <= operator_parameters(packet) else None


def _operator_options(call: KernelCall) -> dict[str, Any]:
    return {
        "softmax_scale": call.scale,
        "is_causal": call.right == 0,
        "window_size_left": call.left,
        "window_size_right": call.right,
        "softcap": call.softcap,
        # As the functions have it; the operator's own default would let it choose.
        "num_splits": 1,
    }


def _is_plain(tensor: Tensor) -> bool:
    return tensor.__class__ is Tensor and not (tensor.requires_grad and torch.is_grad_enabled())


def _absent(function: Callable[..., object], given: Mapping[str, object]) -> dict[str, None]:
    """None for each parameter that the function demands beyond query, key, value and those given."""
    demanded = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return {name: None for name in demanded[3:] if name not in given}


def _device_rule(architecture: str, library: FlashAttention3 | None) -> tuple[Refusal, ...]:
    capability = compute_capability(architecture)
    if capability is None or capability // 10 == 9:
        return ()
    ampere = library is not None and bool(library.flags) and not library.lacks("SM8x")
    if capability // 10 == 8 and ampere:
        return ()
    return (Refusal("device", architecture, "sm90, or sm8x with a build that has it"),)


def _build_rules(request: AttentionRequest, library: FlashAttention3, dim: int) -> tuple[Refusal, ...]:
    wanted = {
        "FP16": ("dtype", "float16", "bfloat16", request.dtype == torch.float16),
        "LOCAL": ("window_size", str(request.window_size), "no window", request.window_size is not None),
        "SOFTCAP": ("softcap", str(request.softcap), "no softcap", request.softcap > 0),
        "VARLEN": ("cu_seqlens", "packed sequences", "batched calls", request.packed),
        "BACKWARD": ("gradients", "inputs that require gradients", "inference", request.wants_gradient),
    }
    refusals = [
        Refusal(rule, f"{have}, left out of this build of {library.name}", need, "install a build that has it")
        for feature, (rule, have, need, given) in wanted.items()
        if given and library.lacks(feature)
    ]
    if dim > library.max_head_dim:
        refusals.append(Refusal("head_dim", str(dim), f"at most {library.max_head_dim}, the most that was built"))
    return tuple(refusals)
