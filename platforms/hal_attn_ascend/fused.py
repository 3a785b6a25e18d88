"""`ascend_fa`: CANN's flash attention on Atlas A2, A3 and Ascend 950, by the operator that suits a call."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionMetadataBuilder
from hal_attn.capabilities import Capabilities
from hal_attn.kernels import BatchedKernel, KernelCall, KernelResult, PackedKernel, with_sinks
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn_ascend.fusion import FusionOperator
from hal_attn_ascend.generations import Generation, generation_of
from hal_attn_ascend.inference import InferenceOperator
from hal_attn_ascend.metadata import AscendMetadataBuilder
from hal_attn_ascend.problem import Problem

GENERATIONS = (Generation.A2, Generation.A3, Generation.ASCEND_950)
INFERENCE_GENERATIONS = (Generation.A2, Generation.A3)
TRIANGLE_SIZE = 2048


class AscendFusedBackend(BatchedKernel, PackedKernel):
    """`npu_fused_infer_attention_score` where it computes the call (`InferenceOperator`), else `npu_fusion_attention`
    (`FusionOperator`): gradients, dropout, masks, float32, and whatever exceeds the first.

    Neither has softcap. ALiBi could only be given as Sq * Sk numbers for each head, so it is refused. Neither says that
    it repeats bit by bit.
    """

    name = "ascend_fa"
    distribution = "torch-npu"
    install = "pip install 'hal-attn[ascend]'"
    one_head_dim = False
    native_sinks = True
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        max_head_dim=768,
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
        option_gradients=frozenset({"sinks"}),
    )

    def __init__(self, library: Any, architecture: Any) -> None:
        super().__init__(library, architecture)
        self._triangles: dict[torch.device, Tensor] = {}

    @cached_property
    def fusion(self) -> FusionOperator:
        """The training operator of the installed torch_npu."""
        return FusionOperator(self.library)

    @cached_property
    def inference(self) -> InferenceOperator:
        """The inference operator of the installed torch_npu."""
        return InferenceOperator(self.library)

    def refusals(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        refusals = super().refusals(request)
        architecture = self.architecture(request.device)
        if generation_of(architecture) not in GENERATIONS:
            allowed = ", ".join(generation.value for generation in GENERATIONS)
            return (*refusals, Refusal("device", architecture, allowed))
        if request.sinks and request.wants_gradient and not self.fusion.sink:
            have = "sinks with gradients wanted, in a torch-npu without sinks"
            refusals += (Refusal("sinks", have, "torch-npu 7.3, or sinks without gradients", self.install),)
        problem = Problem.of_request(request)
        if self._infers(problem, request.device):
            return refusals
        return refusals + self.fusion.refusals(problem)

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> KernelResult:
        problem = Problem.of_call(query, key, value, call)
        banded = call.left >= 0 or call.right >= 0
        triangle = self._triangle(query.device) if banded and call.masks is None else None
        if not self._infers(problem, query.device):
            return self.fusion.run(query, key, value, call, triangle)
        if call.sinks is None or self.inference.takes_sinks(call, value.shape[-1]):
            return self.inference.run(query, key, value, call, triangle)
        without = replace(call, sinks=None, needs_lse=True)
        output, lse = self.inference.run(query, key, value, without, triangle)
        assert lse is not None
        output, lse = with_sinks(output, lse, call.sinks)
        return output, lse if call.needs_lse else None

    def metadata_builder(self) -> AttentionMetadataBuilder:
        return AscendMetadataBuilder()

    def _infers(self, problem: Problem, device: torch.device) -> bool:
        return generation_of(self.architecture(device)) in INFERENCE_GENERATIONS and self.inference.takes(problem)

    def _triangle(self, device: torch.device) -> Tensor:
        """The mask of every triangle and band, whatever its size: bool, True above the diagonal; one a device."""
        if device not in self._triangles:
            with torch.inference_mode(False):
                ones = torch.ones(TRIANGLE_SIZE, TRIANGLE_SIZE, dtype=torch.bool, device=device)
                self._triangles[device] = ones.triu(1)
        return self._triangles[device]
