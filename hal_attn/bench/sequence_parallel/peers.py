"""Other sequence parallelism that is installed, on the same inputs: yunchang, and PyTorch's context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal_attn.bench.problem import Problem
from hal_attn.bench.sequence_parallel.contenders import Contender, Running, Tensors
from hal_attn.bench.sequence_parallel.ranks import Ranks

_DENSE_ONLY = "it has no packed sequences of different lengths"


def find_peers(ranks: Ranks) -> tuple[list[Contender], list[str]]:
    """Those that are installed, and of the others why they are not here. Made on all ranks alike."""
    if ranks.size == 1:
        return [], ["peers: one rank shares with nobody"]
    found: list[Contender] = []
    missing = []
    if find_spec("yunchang") is None:
        missing.append("yunchang: not installed; pip install yunchang")
    else:
        kernels = ("flash",) if ranks.device.type == "cpu" else ("flash", "fa3")
        found += [Yunchang(ranks, form, kernel) for form in ("ulysses", "ring") for kernel in kernels]
    kinds = ("flash",) if ranks.device.type == "cpu" else ("flash", "cudnn")
    found += [TorchContextParallel(ranks, method, kind) for method in ("gather", "rotate") for kind in kinds]
    return found, missing


def _refusal(problem: Problem, multiple: int) -> str | None:
    if problem.packed:
        return _DENSE_ONLY
    if problem.tokens % multiple:
        return f"{problem.tokens} tokens are no multiple of {multiple}, and it pads nothing"
    return None


@dataclass(frozen=True)
class Yunchang:
    """`yunchang.LongContextAttention` of one degree, contiguous rows; its kernels are PyTorch's flash, or FA3.

    On the CPU its PyTorch kernel is the CUDA operator; the CPU's operator of the same arguments stands in for it.
    """

    ranks: Ranks
    form: str
    kernel: str
    peer: bool = True
    failures: tuple[type[Exception], ...] = (Exception,)

    @property
    def name(self) -> str:
        return f"yunchang {self.form} {self.kernel}"

    def refusal(self, problem: Problem, backward: bool) -> str | None:
        # It would raise with its messages already sent, and the group would never be in order again.
        if self.kernel == "fa3" and not import_module("yunchang.globals").HAS_FLASH_ATTN_HOPPER:
            return "it knows FlashAttention 3 only as the module flash_attn_interface, which is not installed"
        if self.kernel == "flash" and backward:
            return "not implemented: the backward pass of its PyTorch kernels (0.6.4)"
        return _refusal(problem, self.ranks.size)

    @contextmanager
    def opened(self, problem: Problem, tensors: Tensors, backends: Sequence[str]) -> Iterator[Running]:
        attention, layer = import_module("yunchang.kernels.attention"), self._layer

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output: Tensor = layer(query, key, value, causal=problem.causal, softmax_scale=problem.head_dim**-0.5)
            return output

        name = "_scaled_dot_product_flash_attention"
        original = getattr(attention, name)
        if self.ranks.device.type == "cpu":
            setattr(attention, name, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
        try:
            yield Running(attend, self._shard, self._shard)
        finally:
            setattr(attention, name, original)

    @cached_property
    def _layer(self) -> Any:
        """The layer, and with it the process groups, made once on all ranks alike."""
        yunchang, kernels = import_module("yunchang"), import_module("yunchang.kernels")
        size = self.ranks.size
        degrees = (size, 1) if self.form == "ulysses" else (1, size)
        yunchang.set_seq_parallel_pg(*degrees, self.ranks.rank, size)
        kind, form = ("TORCH_FLASH", "basic_pytorch") if self.kernel == "flash" else ("FA3", "basic")
        return yunchang.LongContextAttention(ring_impl_type=form, attn_type=getattr(kernels.AttnType, kind))

    def _shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks.size, 1)[self.ranks.rank].contiguous()


@dataclass(frozen=True)
class TorchContextParallel:
    """`torch.distributed.tensor.experimental.context_parallel` over `scaled_dot_product_attention`.

    Causal rows are dealt zigzag, as it does by default. Without causal its public face refuses; the private option that
    its own tests use turns the dealing off, so that this case is measured too.
    """

    ranks: Ranks
    method: str
    kind: str
    peer: bool = True
    failures: tuple[type[Exception], ...] = (Exception,)

    @property
    def name(self) -> str:
        return f"torch {self.method} {self.kind}"

    def refusal(self, problem: Problem, backward: bool) -> str | None:
        return _refusal(problem, self.ranks.size * (2 if problem.causal else 1))

    @contextmanager
    def opened(self, problem: Problem, tensors: Tensors, backends: Sequence[str]) -> Iterator[Running]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        private: Any = import_module("torch.distributed.tensor.experimental._attention")
        kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[self.kind]
        private.set_rotate_method({"gather": "allgather", "rotate": "alltoall"}[self.method])
        balanced, private._cp_options.enable_load_balance = private._cp_options.enable_load_balance, problem.causal
        # The context shards what it is given in place; rows are sharded below, so it gets something small to chew on.
        buffer = torch.zeros(1, 1, 2 * self.ranks.size, 1, device=self.ranks.device)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
            grouped = problem.heads != problem.kv_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped).transpose(1, 2)

        def shard(whole: Tensor) -> Tensor:
            size, rank = self.ranks.size, self.ranks.rank
            if not problem.causal:
                return whole.chunk(size, 1)[rank].contiguous()
            chunks = whole.chunk(2 * size, 1)
            return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)

        try:
            with sdpa_kernel(kernel), context_parallel(self._mesh, buffers=[buffer], buffer_seq_dims=[2]):
                yield Running(attend, shard, shard)
        finally:
            private._cp_options.enable_load_balance = balanced
            # Its caches keep the mesh for ever, which must not keep the process groups: it finds them again by name.
            getattr(self._mesh, "_pg_registry", {}).clear()

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.ranks.device.type, (self.ranks.size,))
