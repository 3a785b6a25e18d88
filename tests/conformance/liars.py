"""Backends whose word does not hold: each is right in everything but one promise."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from hal_attn.capabilities import Capabilities
from hal_attn.chunked import chunked_attention
from hal_attn.refusal import Refusal
from tests.conformance.working import Working


class ClaimsNothing(Working):
    capabilities = Capabilities()


class CannotBeAsked(Working):
    capabilities = None


class RaisesWhenAsked(Working):
    def implements(self, hook):
        if hook == "forward_ring_kv_chunk":
            raise RuntimeError("ask again later")
        return super().implements(hook)


class HasNoHook(Working):
    def implements(self, hook):
        return False


class ClaimsWhatItsHookLacks(Working):
    """A window is claimed, and no hook has a parameter for it."""

    def forward(self, query, key, value, *, scale=None, causal=False, return_lse=False):
        return super().forward(query, key, value, scale=scale, causal=causal, return_lse=return_lse)

    forward_varlen = Working.forward_varlen


class RefusesWhatItClaims(Working):
    def refusals(self, request):
        extra = (Refusal("window_size", "given", "no window"),) if request.window_size else ()
        return super().refusals(request) + extra


class RefusesByAnotherName(Working):
    capabilities = replace(Working.capabilities, softcap=False)

    def refusals(self, request):
        found = super().refusals(request)
        return tuple(Refusal("mood", "bad", "good") if refusal.rule == "softcap" else refusal for refusal in found)


class Raises(Working):
    def attend(self, query, key, value, *, alibi_slopes=None, **options):
        if alibi_slopes is not None:
            raise RuntimeError("CUDA error: misaligned address")
        return super().attend(query, key, value, **options)


class Exits(Working):
    def attend(self, query, key, value, *, softcap=0.0, **options):
        if softcap:
            sys.exit("no licence for softcap")
        return super().attend(query, key, value, **options)


class HeadsFirst(Working):
    """The output as `[B, H, S, D]`."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output.transpose(1, 2), lse


class LseRowsFirst(Working):
    """The LSE as `[B, Sq, H]`."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output, lse.transpose(1, 2)


class OutputInFloat32(Working):
    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output.float(), lse


class LseInFloat64(Working):
    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output, lse.double()


class ReturnsNone(Working):
    def forward(self, query, key, value, **options):
        return None


class NotANumber(Working):
    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        if output.shape[1] > 30:
            output = output.clone()
            output[:, 30, 0] = torch.nan
        return output, lse


class NotZeroWhereBlind(Working):
    """A query that sees no key has the mean of the values."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        blind = torch.isneginf(lse).transpose(1, 2).unsqueeze(-1)
        mean = value.mean(1, keepdim=True).repeat_interleave(query.shape[2] // key.shape[2], 2)
        return torch.where(blind, mean, output), lse


class Detached(Working):
    """Gradients are claimed, and nothing flows back."""

    def attend(self, query, key, value, **options):
        return super().attend(query.detach(), key.detach(), value.detach(), **options)


class GradientWithoutScale(Working):
    """The gradient of query lacks the scale."""

    def attend(self, query, key, value, **options):
        factor = options.get("scale") or query.shape[-1] ** -0.5
        return super().attend(_Forged.apply(query, 1 / factor), key, value, **options)


class _Forged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class ScaleOfPaddedHeadDim(Working):
    def attend(self, query, key, value, *, scale=None, **options):
        padded = -(-query.shape[-1] // 32) * 32
        return super().attend(query, key, value, scale=padded**-0.5 if scale is None else scale, **options)


class WritesIntoQuery(Working):
    def attend(self, query, key, value, **options):
        found = super().attend(query.clone(), key, value, **options)
        with torch.no_grad():
            query.mul_(0.125)
        return found


class NeverTheSame(Working):
    """deterministic is claimed."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output * (1 + 1e-7 * torch.randint(0, 3, (1,))).to(output.dtype), lse


class DropsTheOthers(Working):
    """dropout_p is taken for the share to keep."""

    def attend(self, query, key, value, *, dropout_p=0.0, **options):
        return super().attend(query, key, value, dropout_p=1 - dropout_p if dropout_p else 0.0, **options)


class NanReachesRows(Working):
    """masked_values_ignored is claimed, of a plain product with the values."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output + (value * 0).sum(1, keepdim=True).repeat_interleave(query.shape[2] // key.shape[2], 2), lse


class ReadsNeighbours(Working):
    """Every row gets a little of the mean of all rows in the call."""

    def forward_varlen(self, query, key, value, *, return_lse=False, **options):
        found = super().forward_varlen(query, key, value, return_lse=return_lse, **options)
        output = found[0] if return_lse else found
        output = output + 1e-7 * value.mean()
        return (output, found[1]) if return_lse else output


class NanReachesNeighbours(Working):
    """Finite values stay where they are; sequences_isolated is claimed."""

    def forward_varlen(self, query, key, value, *, return_lse=False, **options):
        found = super().forward_varlen(query, key, value, return_lse=return_lse, **options)
        output = found[0] if return_lse else found
        output = output + 0 * value.sum()
        return (output, found[1]) if return_lse else output


class SplitsOneQuery(Working):
    """deterministic is claimed; with one query the parts of the keys are joined in any order, which the LSE shows."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output, lse if query.shape[1] > 1 else lse * (1 + 1e-6 * torch.rand(1))


class OneMetadataForAll(Working):
    """What is prepared for a batch is kept by its total, and serves batches of other lengths."""

    def __init__(self):
        self.kept = {}

    def forward_varlen(self, query, key, value, *, cu_seqlens, cu_seqlens_k=None, metadata=None, **options):
        cu_seqlens = self.kept.setdefault((query.shape[0], len(cu_seqlens), cu_seqlens_k is None), cu_seqlens)
        return super().forward_varlen(query, key, value, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, **options)


class ChunksOfAnotherBase(Working):
    """The ring hook gives the LSE in base 2."""

    def forward_ring_kv_chunk(self, query, key, value, **options):
        output, lse = super().forward_ring_kv_chunk(query, key, value, **options)
        return output, lse * 1.4426950408889634


class IgnoresStrides(Working):
    """Reads memory as if it were contiguous."""

    def attend(self, query, key, value, **options):
        return chunked_attention(*(_as_if_contiguous(tensor) for tensor in (query, key, value)), **options)


def _as_if_contiguous(tensor):
    if tensor.is_contiguous() or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        return tensor
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, 0)
