"""What the forward pass of an opaque operator keeps for its backward pass: the autograd graph of the call itself.

So every kernel gets the backward pass that it has in eager mode, with nothing computed twice. One thing differs. Around
an operator a compiler gives memory that it believes dead to other tensors, and it cannot see into a graph that is kept
here. So the graph keeps nothing that came from outside: a tensor that it saved and that lies in an input or an output
of the operator is let go, and taken again from the tensors that the backward operator is given.

```
forward    inputs -> [ detached leaves -> kernel -> output, LSE ]      kept: the graph, and what only the kernel made
backward   inputs, output, LSE, gradients -> [ the same graph ] -> gradients of the leaves
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
# What the dispatcher shuts off below its autograd layer, where operators are implemented.
_SHUT = ("AutogradFunctionality", "ADInplaceOrView", "AutogradOther", "AutogradNestedTensor")


@dataclass
class _Given:
    """The inputs and outputs of the operator, while its backward pass runs; `layouts` are those of the forward pass.

    An object of its own: the graph refers to it and not to the tape, which holds the graph.
    """

    layouts: list[_Layout | None] = field(default_factory=list)
    tensors: list[Tensor | None] = field(default_factory=list)

    def tensor(self, index: int) -> Tensor:
        """The tensor in the layout that it had; a compiler may have made it again in another."""
        tensor, layout = self.tensors[index], self.layouts[index]
        assert tensor is not None
        assert layout is not None
        if tensor.stride() != layout.stride:
            moved = torch.empty_strided(layout.size, layout.stride, dtype=tensor.dtype, device=tensor.device)
            self.tensors[index] = tensor = moved.copy_(tensor)
        return tensor


@dataclass(frozen=True)
class _Layout:
    """Where a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def holds(self, other: _Layout) -> bool:
        """The first and the last element of `other`, which shares the storage, are elements of this one."""
        reach = sum((size - 1) * stride for size, stride in zip(other.size, other.stride, strict=True))
        return self._has(other.offset - self.offset) and self._has(other.offset - self.offset + reach)

    def _has(self, place: int) -> bool:
        for stride, size in sorted(zip(self.stride, self.size, strict=True), reverse=True):
            if stride > 0:
                place -= min(max(place // stride, 0), size - 1) * stride
        return place == 0


@dataclass(eq=False)
class _Saved:
    """A tensor that the graph saved: itself, or which part of what the operator is given."""

    given: _Given
    tensor: Tensor | None
    index: int = 0
    layout: _Layout | None = None

    def let_go(self, known: Sequence[Tensor | None]) -> None:
        """Keep no memory of these tensors."""
        tensor = self.tensor
        assert tensor is not None
        storage = tensor.untyped_storage().data_ptr()
        layout = _Layout.of(tensor)
        shared = False
        for index, (candidate, about) in enumerate(zip(known, self.given.layouts, strict=True)):
            if candidate is None or about is None or not storage or candidate.untyped_storage().data_ptr() != storage:
                continue
            shared = True
            if candidate.dtype == tensor.dtype and about.holds(layout):
                self.tensor, self.index, self.layout = None, index, layout
                return
        if shared:
            # A view that cannot be found again in what the backward pass is given.
            self.tensor = tensor.clone()

    def restored(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        about = self.given.layouts[self.index]
        assert self.layout is not None
        assert about is not None
        base = self.given.tensor(self.index)
        place = base.storage_offset() + self.layout.offset - about.offset
        return base.as_strided(self.layout.size, self.layout.stride, place)


class Tape:
    """The autograd graph of one call; `gradients` runs it backward, any number of times."""

    def __init__(self, roots: Outputs, leaves: tuple[Tensor, ...], given: _Given) -> None:
        self._roots, self._leaves, self._given = roots, leaves, given

    def gradients(
        self, grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the inputs that wanted one, in order, for those of the outputs; None where nothing depends."""
        pairs = [
            (root, grad) for root, grad in zip(self._roots, grads, strict=True) if grad is not None and root.grad_fn
        ]
        if not pairs:
            return [None] * len(self._leaves)
        roots, given = zip(*pairs, strict=True)
        self._given.tensors = [*inputs, *outputs]
        try:
            with _Autograd():
                found = torch.autograd.grad(roots, self._leaves, given, retain_graph=True, allow_unused=True)
        finally:
            self._given.tensors = []
        return list(found)


def record(
    run: Callable[[Sequence[Tensor | None]], Outputs], inputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Outputs, Tape]:
    """`run(inputs)` and the tape of it: `wanted` says which of the inputs want a gradient. The outputs returned are
    contiguous, and hold no graph."""
    given, saved = _Given(), []

    def pack(tensor: Tensor) -> _Saved:
        saved.append(_Saved(given, tensor.detach()))
        return saved[-1]

    with _Autograd(), torch.autograd.graph.saved_tensors_hooks(pack, _Saved.restored):
        taken = [
            tensor if tensor is None else tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(inputs, wanted, strict=True)
        ]
        roots = run(taken)
    leaves = tuple(tensor for tensor in taken if tensor is not None and tensor.requires_grad)
    outputs = tuple(root.detach().contiguous() for root in roots)
    known = [*inputs, *outputs]
    given.layouts = [tensor if tensor is None else _Layout.of(tensor) for tensor in known]
    for part in saved:
        part.let_go(known)
    return outputs, Tape(roots, leaves, given)


class _Autograd:
    """Within it operators build a graph, as they do outside of an operator's implementation."""

    def __enter__(self) -> None:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for name in _SHUT:
            excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
        self._guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
        self._grad = torch.enable_grad()
        self._guard.__enter__()
        self._grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._grad.__exit__(None, None, None)
        self._guard.__exit__(None, None, None)
