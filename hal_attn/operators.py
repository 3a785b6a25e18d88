"""The calls as operators of PyTorch, which compiled and exported programs hold: `torch.ops.hal_attn.*`.

Each is opaque: a compiler knows its shapes, and what runs is the call itself, at run time. So the backend is chosen
from the lengths, the environment and the `use_backend` of that moment, and another length compiles nothing again.

```
hal_attn::attention           query, key, value, ... -> output, LSE, tape
hal_attn::attention_backward  gradients, all that the forward pass had, output, LSE, tape -> gradients
```

`tape` carries the autograd graph (`hal_attn.tape`). Where it was lost on the way, because somebody copied the tensor it
rides on, the backward pass computes the call once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionResult
from hal_attn.carrier import carried_by, carry
from hal_attn.errors import InvalidAttentionInputError, UnsupportedAttentionError
from hal_attn.packing import PackedSequences
from hal_attn.tape import Tape, record

NAMESPACE = "hal_attn"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (
    "float? scale, bool causal, SymInt left, SymInt right, float softcap, float dropout_p, bool deterministic, "
    "bool return_lse, str[]? backend"
)
_LAST = ("output", "lse", "tape")


@dataclass(frozen=True)
class Operator:
    """One call as an operator with a backward pass.

    Attributes:
        name: within the namespace.
        tensors: the parameters that may want a gradient, in order; query, key and value first.
        others: the rest of the schema, without `wanted`, which says which of `tensors` want a gradient.
        run: the call, by keywords: `tensors` and `others`.
    """

    name: str
    tensors: tuple[str, ...]
    others: str
    run: Callable[..., AttentionResult]

    @cached_property
    def arguments(self) -> str:
        """The parameters of the schema."""
        given = [f"Tensor{'' if name in ('query', 'key', 'value') else '?'} {name}" for name in self.tensors]
        return ", ".join((*given, self.others, "bool[] wanted"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(part.split()[-1] for part in self.arguments.split(", "))

    def define(self) -> None:
        """Make both operators known to PyTorch."""
        both = ", ".join(f"Tensor {name}" for name in _LAST)
        LIBRARY.define(f"{self.name}({self.arguments}) -> (Tensor, Tensor, Tensor)", tags=_tags())
        LIBRARY.define(
            f"{self.name}_backward(Tensor? grad_output, Tensor? grad_lse, {self.arguments}, {both}) -> Tensor[]",
            tags=_tags(),
        )
        name = f"{NAMESPACE}::{self.name}"
        LIBRARY.impl(self.name, self.forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{self.name}_backward", self.backward, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self.shapes, lib=LIBRARY)
        torch.library.register_fake(f"{name}_backward", self.gradient_shapes, lib=LIBRARY)
        torch.library.register_autograd(name, self.differentiate, setup_context=self.save, lib=LIBRARY)

    # The implementations

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The call, and the tape of it where a gradient is wanted."""
        given = dict(zip(self.names, arguments, strict=True))
        if any(given["wanted"]):
            inputs, run, wanted = self._call(given)
            outputs, tape = record(run, inputs, wanted)
            return (*_both(outputs), carry(tape))
        del given["wanted"]
        with torch.no_grad():
            result = self.run(**given)
        parts = result if isinstance(result, tuple) else (result,)
        return (*_both(tuple(part.contiguous() for part in parts)), torch.empty(0, dtype=torch.int64, device="cpu"))

    def backward(self, grad_output: Tensor | None, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
        """The gradients of what wanted one, contiguous."""
        given = dict(zip((*self.names, *_LAST), arguments, strict=True))
        inputs, run, wanted = self._call(given)
        outputs: tuple[Tensor, ...] = (given["output"], given["lse"])[: 1 + given["return_lse"]]
        tape = carried_by(given["tape"])
        if not isinstance(tape, Tape):
            if given.get("dropout_p"):
                raise UnsupportedAttentionError(
                    f"{self.name}: the graph of a call with dropout was lost before its backward pass, by a hook that "
                    "copies saved tensors; leave dropout off, or do not move the saved tensors of this call"
                )
            outputs, tape = record(run, inputs, wanted)
        found = tape.gradients((grad_output, grad_lse)[: len(outputs)], inputs, outputs)
        likes = [tensor for tensor, wants in zip(inputs, wanted, strict=True) if wants and tensor is not None]
        known = {
            tensor.untyped_storage().data_ptr() for tensor in (grad_output, grad_lse, *inputs) if tensor is not None
        }
        return [_own(gradient, like, known) for gradient, like in zip(found, likes, strict=True)]

    def _call(
        self, given: dict[str, Any]
    ) -> tuple[list[Tensor | None], Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]], list[bool]]:
        inputs = [given[name] for name in self.tensors]
        options = {name: value for name, value in given.items() if name not in (*self.tensors, *_LAST, "wanted")}

        def run(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            result = self.run(**dict(zip(self.tensors, tensors, strict=True)), **options)
            return result if isinstance(result, tuple) else (result,)

        return inputs, run, given["wanted"]

    # What a compiler is told of them

    def shapes(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Output, LSE and tape without values. It refuses nothing: the call says at run time what is wrong with it."""
        given = dict(zip(self.names, arguments, strict=True))
        output, lse = result_like(given["query"], given["value"], given["return_lse"])
        return output, lse, torch.empty(int(any(given["wanted"])), dtype=torch.int64, device="cpu")

    def gradient_shapes(self, grad_output: Tensor | None, grad_lse: Tensor | None, *arguments: Any) -> list[Tensor]:
        """Gradients without values."""
        given = dict(zip((*self.names, *_LAST), arguments, strict=True))
        wanting = [name for name, wants in zip(self.tensors, given["wanted"], strict=True) if wants]
        return [torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in wanting]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """What the backward operator is given, kept."""
        everything = (*inputs, *output)
        ctx.save_for_backward(*(value for value in everything if isinstance(value, Tensor)))
        ctx.plain = [None if isinstance(value, Tensor) else (value,) for value in everything]
        ctx.set_materialize_grads(False)

    def differentiate(self, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Any, ...]:
        """The gradient of each parameter of the forward operator."""
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if value is None else value[0] for value in ctx.plain]
        wanted = arguments[self.names.index("wanted")]
        gradients: list[Tensor | None] = [None] * len(self.names)
        if grad_output is not None or grad_lse is not None:
            operator = getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_backward")
            found = iter(operator(grad_output, grad_lse, *arguments))
            for index, wants in enumerate(wanted):
                if wants:
                    gradients[index] = next(found)
        return tuple(gradients)


def _tags() -> tuple[torch.Tag, ...]:
    """Dropout draws random numbers. A CUDA graph that a compiler captures by itself would not run the host's part of a
    call again, and so keep the lengths, the choice and the tape of the first."""
    names = ("nondeterministic_seeded", "needs_fixed_stride_order", "pt2_compliant_tag", "cudagraph_unsafe")
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


def result_like(query: Tensor, value: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Output `[..., S, H, Dv]` and LSE `[..., H, S]`, empty where it is not wanted, without values; of any tensors."""
    shape = query.shape
    output = query.new_empty((*shape[:-1], value.shape[-1] if value.dim() else 1))
    lse = (*shape[:-3], shape[-2], shape[-3]) if return_lse and query.dim() > 2 else (0,)
    return output, query.new_empty(lse, dtype=torch.float32)


def _both(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Output and LSE; an empty one where it is not wanted."""
    return (outputs[0], outputs[1] if len(outputs) == 2 else outputs[0].new_empty(0, dtype=torch.float32))


def _own(gradient: Tensor | None, like: Tensor, known: set[int]) -> Tensor:
    """A contiguous gradient in memory of its own, as what an operator returns must be."""
    if gradient is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    gradient = gradient.contiguous()
    place = gradient.untyped_storage().data_ptr()
    if place in known:
        return gradient.clone()
    known.add(place)
    return gradient


def _attention(*, left: int, right: int, backend: Sequence[str] | None, **options: Any) -> AttentionResult:
    from hal_attn import functional

    return functional.attention(**options, window_size=_window(left, right), backend=_names(backend))


def _varlen_attention(
    *,
    left: int,
    right: int,
    backend: Sequence[str] | None,
    sequences: Tensor | None,
    cu_seqlens_host: Sequence[int] | None,
    cu_seqlens_host_tensor: Tensor | None,
    cu_seqlens_k_host: Sequence[int] | None,
    cu_seqlens_k_host_tensor: Tensor | None,
    max_seqlen: int | None,
    max_seqlen_tensor: Tensor | None,
    max_seqlen_k: int | None,
    max_seqlen_k_tensor: Tensor | None,
    **options: Any,
) -> AttentionResult:
    from hal_attn import functional

    host: Any = cu_seqlens_host if cu_seqlens_host_tensor is None else cu_seqlens_host_tensor
    host_k: Any = cu_seqlens_k_host if cu_seqlens_k_host_tensor is None else cu_seqlens_k_host_tensor
    longest: Any = max_seqlen if max_seqlen_tensor is None else max_seqlen_tensor
    longest_k: Any = max_seqlen_k if max_seqlen_k_tensor is None else max_seqlen_k_tensor
    known: Any = None if sequences is None else carried_by(sequences)
    if sequences is not None and known is None:
        raise InvalidAttentionInputError("sequences", "some that are gone", "sequences that are kept")
    if known is None and options["cu_seqlens"] is None:
        # Made while the program was traced, from lengths.
        known, host, host_k = PackedSequences.from_lengths(_lengths(host), host_k and _lengths(host_k)), None, None
    return functional.varlen_attention(
        **options,
        sequences=known,
        cu_seqlens_host=host,
        cu_seqlens_k_host=host_k,
        max_seqlen=longest,
        max_seqlen_k=longest_k,
        window_size=_window(left, right),
        backend=_names(backend),
    )


def _window(left: int, right: int) -> tuple[int, int] | None:
    return None if left == right == -1 else (left, right)


def _names(backend: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if backend is None else tuple(backend)


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(offsets)]


def _refuse(
    query: Tensor | None, value: Tensor | None, return_lse: bool, argument: str, got: str, allowed: str, remedy: str
) -> tuple[Tensor, Tensor]:
    raise InvalidAttentionInputError(argument, got, allowed, remedy)


def _refuse_shapes(
    query: Tensor | None, value: Tensor | None, return_lse: bool, *message: str
) -> tuple[Tensor, Tensor]:
    if query is None or value is None:
        return torch.empty(0), torch.empty(0)
    return result_like(query, value, return_lse)


ATTENTION = Operator(
    "attention",
    ("query", "key", "value", "mask", "sinks", "alibi_slopes"),
    f"Tensor? key_padding_mask, {_PLAIN}",
    _attention,
)
VARLEN_ATTENTION = Operator(
    "varlen_attention",
    ("query", "key", "value", "sinks", "alibi_slopes"),
    "Tensor? sequences, Tensor? cu_seqlens, Tensor? cu_seqlens_k, SymInt[]? cu_seqlens_host, "
    "Tensor? cu_seqlens_host_tensor, SymInt[]? cu_seqlens_k_host, Tensor? cu_seqlens_k_host_tensor, "
    "SymInt? max_seqlen, Tensor? max_seqlen_tensor, SymInt? max_seqlen_k, Tensor? max_seqlen_k_tensor, "
    f"{_PLAIN}",
    _varlen_attention,
)


OPERATORS = (ATTENTION, VARLEN_ATTENTION)


def _define() -> None:
    for operator in OPERATORS:
        operator.define()
    message = "str argument, str got, str allowed, str remedy"
    LIBRARY.define(f"refuse(Tensor? query, Tensor? value, bool return_lse, {message}) -> (Tensor, Tensor)")
    LIBRARY.impl("refuse", _refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::refuse", _refuse_shapes, lib=LIBRARY)


_define()
