"""amd-aiter 0.1.7's attention on the CPU: its dispatch between CK and assembly, and what each of them gets wrong.

Read from aiter/ops/mha.py and the C++ beneath it (csrc/py_itfs_ck, csrc/py_itfs_cu, hsa/*/codegen.py).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from hal_attn.simulation.aten import host_offsets, must, with_gradient_of
from hal_attn.simulation.attention import Attended, Band, attend, attend_packed, spoiled_by_scale

ASSEMBLY_ARCHITECTURES = ("gfx942", "gfx950")
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call, batched or packed, in the vendor's own terms; windows as its Python has normalised them."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: tuple[list[int], list[int]] | None
    longest: int
    longest_k: int
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float = 0.0
    bias: Tensor | None = None
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    top_left: bool = False

    @property
    def seen_as_window(self) -> bool:
        """The vendor's test for a window, which misses a left edge of 0."""
        return self.left > 0 or self.right > 0

    @property
    def gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (self.q, self.k, self.v))

    @property
    def equal_lengths(self) -> bool:
        if self.offsets is None:
            return self.longest == self.longest_k
        return self.offsets[0] == self.offsets[1]

    def attended(self) -> Attended:
        band = Band(self.left, 0 if self.causal else self.right, self.top_left)
        options: dict[str, Any] = {
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "slopes": self.slopes,
        }
        if self.offsets is not None:
            must(self.bias is None, "the simulation has no bias of packed calls")
            attended = attend_packed(self.q, self.k, self.v, *self.offsets, band=band, **options)
            return spoiled_by_scale(attended, self.scale)
        visible = band.visible(self.longest, self.longest_k)
        attended = attend(self.q, self.k, self.v, visible=visible, bias=self.bias, **options)
        return spoiled_by_scale(attended, self.scale)


@dataclass(frozen=True)
class SimulatedAiter:
    """The package's functions on one generation; a row without keys gives LSE `empty_lse`, -inf by the vendor."""

    architecture: str
    empty_lse: float = -math.inf

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        how_v3_bf16_cvt: int = 1,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
    ) -> Result:
        must(cu_seqlens_q is None and cu_seqlens_kv is None, "the simulation has no padded batches")
        call = _Call(
            q=q,
            k=k,
            v=v,
            offsets=None,
            longest=q.shape[1],
            longest_k=k.shape[1],
            scale=_scale(q, softmax_scale),
            causal=causal,
            left=_edge(window_size[0], k.shape[1]),
            right=_edge(window_size[1], k.shape[1]),
            bias=bias,
            slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        return self._run(call, deterministic, return_lse, return_attn_probs, how_v3_bf16_cvt)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        min_seqlen_q: int = 0,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        how_v3_bf16_cvt: int = 1,
        block_table: Tensor | None = None,
        out: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_k_padded: Tensor | None = None,
    ) -> Result:
        absent = (block_table, out, cu_seqlens_q_padded, cu_seqlens_k_padded)
        must(all(tensor is None for tensor in absent), "the simulation has no paged keys, padding or output")
        call = _Call(
            q=q,
            k=k,
            v=v,
            offsets=(host_offsets(cu_seqlens_q, max_seqlen_q), host_offsets(cu_seqlens_k, max_seqlen_k)),
            longest=max_seqlen_q,
            longest_k=max_seqlen_k,
            scale=_scale(q, softmax_scale),
            causal=causal,
            left=_edge(window_size[0], max_seqlen_k),
            right=_edge(window_size[1], max_seqlen_k),
            softcap=logits_soft_cap,
            bias=bias,
            slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        return self._run(call, deterministic, return_lse, return_attn_probs, how_v3_bf16_cvt, min_seqlen_q)

    def mha_varlen_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        min_seqlen_q: int,
        dropout_p: float,
        softmax_scale: float,
        logits_soft_cap: float,
        zero_tensors: bool,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        return_softmax_lse: bool,
        return_dropout_randval: bool,
        out: Tensor | None = None,
        block_table: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        gen: torch.Generator | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_k_padded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        absent = (out, block_table, gen, cu_seqlens_q_padded, cu_seqlens_k_padded)
        must(all(given is None for given in absent), "the simulation has no paged keys, padding, output or generator")
        must(cu_seqlens_k is not None, "cu_seqlens_k must be provided if paged_KV is false")
        assert cu_seqlens_k is not None
        call = _Call(
            q=q.detach(),
            k=k.detach(),
            v=v.detach(),
            offsets=(host_offsets(cu_seqlens_q, max_seqlen_q), host_offsets(cu_seqlens_k, max_seqlen_k)),
            longest=max_seqlen_q,
            longest_k=max_seqlen_k,
            scale=softmax_scale,
            causal=is_causal,
            left=_edge(window_size_left, max_seqlen_k),
            right=_edge(window_size_right, max_seqlen_k),
            softcap=logits_soft_cap,
            bias=bias,
            slopes=alibi_slopes,
            dropout_p=dropout_p,
        )
        attended = _composable_kernel(call, min_seqlen_q)
        lse = attended.lse_with(self.empty_lse) if return_softmax_lse else torch.empty(0)
        return attended.output, lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)

    def _run(
        self,
        call: _Call,
        deterministic: bool,
        return_lse: bool,
        return_attn_probs: bool,
        how_v3_bf16_cvt: int,
        min_seqlen_q: int = 0,
    ) -> Result:
        must(how_v3_bf16_cvt in (0, 1, 2), "invalid argument for fmha_fwd")
        assembly = self._takes_assembly(call)
        attended = self._assembly(call) if assembly else _composable_kernel(call, min_seqlen_q)
        output = attended.output
        if call.gradients:
            assert return_lse
            output = self._with_gradient(call, output, deterministic)
        result = [output]
        if return_lse:
            result.append(attended.lse_with(self.empty_lse).detach())
        if return_attn_probs:
            result.append(torch.empty(0))
        return result[0] if len(result) == 1 else tuple(result)

    def _takes_assembly(self, call: _Call) -> bool:
        """The dispatch of the forward pass: it does not look at softcap and, but for head dim 192, the generation."""
        dims = (call.q.shape[-1], call.v.shape[-1])
        known = dims == (128, 128) or (self.architecture == "gfx950" and dims == (192, 128))
        plain = call.slopes is None and call.bias is None and call.dropout_p == 0.0
        long = call.offsets is not None or call.longest > 128
        return known and plain and long and not call.seen_as_window and call.q.dtype == torch.bfloat16

    def _assembly(self, call: _Call) -> Attended:
        band = (call.left, 0 if call.causal else call.right)
        if self.architecture not in ASSEMBLY_ARCHITECTURES or band not in ((-1, -1), (-1, 0)):
            raise RuntimeError("invalid argument for fmha_fwd")
        _check(call)
        return replace(call, softcap=0.0).attended()

    def _with_gradient(self, call: _Call, output: Tensor, deterministic: bool) -> Tensor:
        """The output with the gradient of the vendor's backward pass, which has no softcap."""
        backward = replace(call, softcap=0.0)
        if self._backward_takes_assembly(call, deterministic):
            if call.left >= 0 or call.right > 0:
                if self.architecture == "gfx950" or not call.seen_as_window:
                    _refuse_backward(output)
            elif call.causal and not call.equal_lengths:
                # What its source says of these kernels: their triangle hangs from the top left.
                backward = replace(backward, top_left=True)
        return output if backward == call else with_gradient_of(backward.attended().output, output)

    def _backward_takes_assembly(self, call: _Call, deterministic: bool) -> bool:
        """The dispatch of the backward pass."""
        dim, dim_v = call.q.shape[-1], call.v.shape[-1]
        plain = call.slopes is None and call.bias is None and call.dropout_p == 0.0
        long = call.offsets is not None or call.longest > 16
        if not plain or not long or dim != dim_v or dim % 8:
            return False
        if self.architecture == "gfx950":
            window = call.offsets is not None and call.seen_as_window
            alone = call.offsets is None and call.longest_k <= 256 and not call.seen_as_window
            return 64 < dim <= 128 and not window and (not deterministic or alone)
        if self.architecture != "gfx942" or deterministic or not 64 <= dim <= 192:
            return False
        return not call.seen_as_window or (call.offsets is None and 64 < dim <= 128)


def _composable_kernel(call: _Call, min_seqlen_q: int) -> Attended:
    _check(call)
    must(call.bias is None or call.slopes is None, "cannot apply bias and alibi at the same time")
    alone = call.bias is None and call.slopes is None
    must(call.softcap == 0.0 or alone, "invalid argument for fmha_fwd")
    if call.bias is not None:
        must(tuple(call.bias.shape) == (call.longest, call.longest_k), "bias shape should be [sq, sk]")
        must(call.bias.stride(-1) == 1, "bias tensor must have contiguous last dimension")
        must(call.bias.dtype == call.q.dtype, "a bias of another dtype, which the kernel would misread")
    if call.slopes is not None:
        must(call.slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension")
        must(call.slopes.dtype == torch.float32, "slopes of another dtype, which the kernel would misread")
    attended = call.attended()
    if call.offsets is None or min_seqlen_q == 0:
        return attended
    # Sequences with that many queries or fewer are skipped: their rows stay as the memory was.
    skipped = torch.cat(
        [torch.full((end - begin,), end - begin <= min_seqlen_q) for begin, end in itertools.pairwise(call.offsets[0])]
    )
    unwritten = attended.output.masked_fill(skipped[:, None, None], torch.nan)
    return Attended(unwritten, attended.lse.masked_fill(skipped, torch.nan), attended.empty)


def _check(call: _Call) -> None:
    q, k, v = call.q, call.k, call.v
    must(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    must(q.dtype == k.dtype == v.dtype, "query and key must have the same dtype")
    must(q.shape[-1] <= 256 and v.shape[-1] <= 256, "CK only supports head dimension at most 256")
    must(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _refuse_backward(output: Tensor) -> None:
    def refuse(gradient: Tensor) -> NoReturn:
        raise RuntimeError("invalid argument for fmha_v3_bwd")

    output.register_hook(refuse)


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _edge(edge: int, longest_k: int) -> int:
    """An edge of at least the longest keys is taken as unlimited, which is only right of the left one."""
    return -1 if edge >= longest_k else edge
