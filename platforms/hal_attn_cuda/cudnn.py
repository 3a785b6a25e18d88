"""`torch_cudnn`: cuDNN's attention through PyTorch, batched."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, to_head_dim
from hal_attn.packing import PackedSequences
from hal_attn.portable.bias import joined_bias
from hal_attn.portable.flash_rules import positive_scale_rule
from hal_attn.portable.generation import capability_rule, compute_capability, grid_rule
from hal_attn.portable.operators import aligned, wants_gradient
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest

OPERATOR = "_scaled_dot_product_cudnn_attention"
BACKWARD = "_scaled_dot_product_cudnn_attention_backward"
WITHOUT_DROPOUT = range(91101, 91400)
WITH_WIDE_HEADS = 91000
WITH_GRADIENTS = 128
LATEST = 121


class TorchCudnnBackend(BatchedKernel):
    """aten `_scaled_dot_product_cudnn_attention`, `[B, H, S, D]`, as of PyTorch 2.13 (the rules are those of its own
    selector, which a direct call goes around).

    Its rules: float16 and bfloat16; compute capability 8.0 to 12.1; head dims padded to a multiple of 8, at most 128,
    and without gradients 256 on sm90 from cuDNN 9.10; at least two keys, so that a single one gets a hidden neighbour;
    a top-left triangle; one additive mask in the dtype of query, without a gradient, which takes causal and windows in;
    dropout not in cuDNN 9.11 to 9.13, nor with a single query; grouped heads as they are. The LSE is `[B, H, Sq, 1]`
    and must be asked for, for the backward pass too. It is not deterministic: two equal calls of one query gave LSEs
    4.8e-7 apart. What a row without keys gives is undocumented, so that none is left in a mask. A scale below 0 gives
    NaN (both seen with cuDNN 9.19 and PyTorch 2.11 on an H200). With more than 2^31 elements in the query the gradients
    of the last sequence were wrong there, without an error: 400 sequences of 10,496 queries, 4 heads of 128, gave half
    of the largest gradient as an error, and 399 were right.
    """

    name = "torch_cudnn"
    head_dim_multiple = 8
    one_head_dim = False
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        max_head_dim=256,
        value_head_dim=True,
        grouped_heads=True,
        causal="bottom_right",
        window=True,
        masks=frozenset({"bool", "float"}),
        mask_dtype_of_query=True,
        key_padding_mask=True,
        sinks=True,
        dropout=True,
        lse=True,
        gradients=True,
    )

    def unavailable(self) -> Refusal | None:
        if hasattr(self.library, OPERATOR):
            return None
        return Refusal("installed", f"PyTorch {torch.__version__}", f"PyTorch with aten {OPERATOR}, 2.5 or later")

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        architecture = self.architecture(request.device)
        refusals = super().refusals(request) + capability_rule(architecture, 80, "cuDNN's attention")
        capability = compute_capability(architecture)
        if capability is not None and capability > LATEST:
            refusals += (Refusal("device", architecture, f"at most sm{LATEST} for cuDNN's attention"),)
        refusals += self._head_dim_rule(request, capability) + positive_scale_rule(request)
        refusals += _size_rule(request)
        if request.wants_gradient:
            refusals += grid_rule(request)
        if request.mask == "none" and not request.key_padding_mask:
            refusals += self._band_rules(request)
        if request.dropout_p > 0 and (request.packed or request.seqlen_q == 1):
            refusals += (Refusal("dropout_p", f"{request.dropout_p}, maybe with one query", "more queries, or 0.0"),)
        version = torch.backends.cudnn.version() or 0
        if request.dropout_p > 0 and version in WITHOUT_DROPOUT:
            refusals += (Refusal("dropout_p", f"cuDNN {version}", "cuDNN before 9.11, or 9.14 and later"),)
        return refusals

    def _band_rules(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        """What the kernel's own triangle cannot do; a mask takes the band in instead."""
        refusals: tuple[Refusal, ...] = ()
        if request.causal and not request.equal_lengths:
            have = "key and query lengths that differ"
            refusals += (Refusal("causal", have, "equal lengths, its triangle is top-left"),)
        if request.window_size is not None:
            refusals += (Refusal("window_size", str(request.window_size), "no window, or a mask that takes it in"),)
        return refusals

    def _head_dim_rule(self, request: AttentionRequest, capability: int | None) -> tuple[Refusal, ...]:
        dim = max(request.head_dim, request.value_head_dim)
        if dim <= 128 or dim > 256:
            return ()
        version = torch.backends.cudnn.version() or 0
        if capability == 90 and 0 < version < WITH_WIDE_HEADS:
            return (Refusal("head_dim", f"{dim} with cuDNN {version}", "at most 128, or cuDNN 9.10"),)
        if capability != 90:
            return (Refusal("head_dim", str(dim), "at most 128, or 256 on sm90"),)
        return (
            (Refusal("head_dim", f"{dim} with gradients", "at most 128 with gradients"),)
            if request.wants_gradient
            else ()
        )

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        bias = None if call.masks is None else joined_bias(call.masks, query.shape[1], key.shape[1])
        causal = bias is None and call.right == 0
        if key.shape[1] == 1:
            key, value, bias = _with_hidden_key(key, value, bias, query.shape[1])
            causal = False
        with_lse = call.needs_lse or wants_gradient(query, key, value)
        rows = (aligned(tensor, self.head_dim_multiple).transpose(1, 2) for tensor in (query, key, value))
        operator: Callable[..., tuple[Tensor, ...]] = getattr(self.library, OPERATOR)
        output, lse, *_ = operator(*rows, bias, with_lse, call.dropout_p, causal, False, scale=call.scale)
        return output.transpose(1, 2), lse.flatten(2) if call.needs_lse else None

    def backward_varlen(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        *,
        sequences: PackedSequences,
        scale: float,
        causal: bool,
        window_size: tuple[int, int] | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """By the operator that its own backward pass ends in, for sequences that are alike: a batch. PyTorch's context
        parallelism calls it so too, with the LSE of the whole result as its own."""
        dims = query.shape[-1], value.shape[-1]
        apart = deterministic or window_size is not None or max(dims) > WITH_GRADIENTS
        if apart or not _a_batch(sequences, causal) or not hasattr(self.library, BACKWARD):
            return None
        query, key, value = self._padded(query, key, value)
        grad_output, output = (to_head_dim(tensor, value.shape[-1]) for tensor in (grad_output, output))

        def batched(tensor: Tensor) -> Tensor:
            # Contiguous, because the kernel takes the strides of output and its gradient from those of query.
            rows = aligned(tensor.contiguous(), self.head_dim_multiple)
            return rows.view(sequences.count, -1, *rows.shape[1:]).transpose(1, 2)

        # Each row sees a key here, so that none has an LSE of -inf, which would make its weights infinite.
        whole = lse.unflatten(1, (sequences.count, -1)).transpose(0, 1)
        rows = [batched(tensor) for tensor in (grad_output, query, key, value, output)]
        # Without dropout nothing is read from the random state.
        state = torch.empty((), dtype=torch.int64, device=query.device)
        given = (whole.contiguous().unsqueeze(-1), state, state, None, None, None)
        lengths = (sequences.max_seqlen, sequences.max_seqlen_k)
        operator: Callable[..., tuple[Tensor, ...]] = getattr(self.library, BACKWARD)
        grads = operator(*rows, *given, *lengths, 0.0, causal, scale=scale)
        found = [grad.transpose(1, 2).flatten(0, 1) for grad in grads]
        return found[0][..., : dims[0]], found[1][..., : dims[0]], found[2][..., : dims[1]]


def _a_batch(sequences: PackedSequences, causal: bool) -> bool:
    """The sequences are known to be alike, of two rows and more, and a triangle of theirs is also a top-left one."""
    if sequences.cu_seqlens_host is None or not sequences.uniform or sequences.count == 0:
        return False
    alike = sequences.max_seqlen == sequences.max_seqlen_k
    return min(sequences.max_seqlen, sequences.max_seqlen_k) > 1 and (alike or not causal)


def _with_hidden_key(key: Tensor, value: Tensor, bias: Tensor | None, seqlen_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """One key and a second that nobody sees."""
    bias = key.new_zeros(1, 1, seqlen_q, 1) if bias is None else bias
    key, value = (F.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (key, value))
    return key, value, aligned(F.pad(bias, (0, 15), value=-torch.inf), 8)[..., :2]


def _size_rule(request: AttentionRequest) -> tuple[Refusal, ...]:
    """Its offsets are taken for 32-bit: the forward pass beyond that was not measured. Packed sequences come padded."""
    dim = -(-max(request.head_dim, request.value_head_dim) // 8) * 8
    sides = {
        "query": (request.tokens_q, request.seqlen_q, request.heads),
        "key": (request.tokens_k, request.seqlen_k, request.kv_heads),
    }
    refusals = []
    for name, (tokens, longest, heads) in sides.items():
        elements = max(tokens, request.batch * (longest or 0)) * heads * dim
        if elements >= 2**31:
            refusals.append(Refusal(name, f"{elements} elements", "fewer than 2^31 elements", "make several calls"))
    return tuple(refusals)
