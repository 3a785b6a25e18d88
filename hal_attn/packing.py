"""Packed sequences: where each begins and ends, on the host and on the device, made once for each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from hal_attn.carrier import refer
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.transfer import to_device, with_index

T = TypeVar("T")
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """The sequences of one packed batch: queries `[Tq, H, D]` and keys `[Tk, Hkv, D]`.

    Make it with `from_lengths` (never waits for a device) or `from_cu_seqlens`. Sequence `n` owns query rows
    `cu_seqlens[n]` to `cu_seqlens[n + 1]` and key rows likewise by `cu_seqlens_k`.

    Attributes:
        cu_seqlens_host, cu_seqlens_k_host: offsets as tuples with a leading 0, None where only the device knows them;
            equal objects where keys are packed like queries.
        max_seqlen, max_seqlen_k: the longest sequence, or a bound that the caller gave.
        count: number of sequences.
        equal_lengths: every sequence is known to have as many queries as keys.
        source: what the caller calls the query and the key offsets, for errors.
        carrier: what stands for them in a compiled graph (`hal_attn.carrier`), which looks at none of the above.
    """

    cu_seqlens_host: tuple[int, ...] | None
    cu_seqlens_k_host: tuple[int, ...] | None
    max_seqlen: int
    max_seqlen_k: int
    count: int
    device: torch.device | None = None
    equal_lengths: bool = False
    source: tuple[str, str] = ("sequences", "sequences")
    _offsets: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False)
    carrier: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        lengths_k: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> PackedSequences:
        """Sequences of these lengths (and key lengths, where they differ).

        `device` is where `cu_seqlens` will be; None is wherever the tensors of a call are. Nothing waits for it.

        Raises:
            InvalidAttentionInputError: a length is negative or no whole number, or the two numbers of sequences differ.
        """
        host = _accumulate("lengths", lengths)
        host_k = host if lengths_k is None else _accumulate("lengths_k", lengths_k)
        _check_counts(len(host) - 1, len(host_k) - 1, "lengths_k")
        return cls._from_host(host, host_k, device=None if device is None else with_index(device))._crossing()

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        host: Sequence[int] | Tensor | None = None,
        host_k: Sequence[int] | Tensor | None = None,
    ) -> PackedSequences:
        """Sequences between these offsets: 1-D integers that start at 0 and never fall.

        Without `host` (the same offsets on the host) offsets on an accelerator are read back once, which waits for it.

        Raises:
            InvalidAttentionInputError: offsets that are none, or that differ in number between queries and keys.
        """
        # Copies, so that what the caller does to its tensors later cannot part them from the host's offsets.
        own = cu_seqlens.clone() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        own_k = cu_seqlens_k.clone() if isinstance(cu_seqlens_k, Tensor) else cu_seqlens_k
        return cls.checked(own, own_k, host, host_k, names=("host", "host_k"))._crossing()

    @classmethod
    def checked(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_k: Tensor | None,
        host: Sequence[int] | Tensor | None,
        host_k: Sequence[int] | Tensor | None,
        names: tuple[str, str],
        source: tuple[str, str] = ("sequences", "sequences"),
    ) -> PackedSequences:
        """`from_cu_seqlens` for a caller whose host offsets are called `names`, all of them `source`."""
        offsets = check_offsets("cu_seqlens", cu_seqlens)
        offsets_k = offsets if cu_seqlens_k is None else check_offsets("cu_seqlens_k", cu_seqlens_k)
        if offsets_k.device != offsets.device:
            raise InvalidAttentionInputError("cu_seqlens_k", f"device {offsets_k.device}", f"device {offsets.device}")
        if offsets.device.type == "meta":
            raise InvalidAttentionInputError("cu_seqlens", "a meta tensor", "a tensor with values on a device")
        if cu_seqlens_k is None and host_k is not None:
            raise InvalidAttentionInputError(names[1], "given", "None unless cu_seqlens_k is given")
        _check_counts(offsets.numel() - 1, offsets_k.numel() - 1, "cu_seqlens_k")
        host_q = host_offsets("cu_seqlens", cu_seqlens) if host is None else host_offsets(names[0], host)
        _check_counts(offsets.numel() - 1, len(host_q) - 1, names[0])
        both = host_q
        if cu_seqlens_k is not None:
            both = host_offsets("cu_seqlens_k", cu_seqlens_k) if host_k is None else host_offsets(names[1], host_k)
            _check_counts(offsets.numel() - 1, len(both) - 1, names[1])
        return cls._from_host(host_q, both, device=offsets.device, offsets=(offsets, offsets_k), source=source)

    @classmethod
    def from_device_offsets(
        cls, offsets: Tensor, offsets_k: Tensor, max_seqlen: int, max_seqlen_k: int
    ) -> PackedSequences:
        """Sequences whose offsets only the device knows; the longest lengths are the caller's word. Never waits."""
        _check_counts(offsets.numel() - 1, offsets_k.numel() - 1, "cu_seqlens_k")
        return cls(
            None,
            None,
            max_seqlen,
            max_seqlen_k,
            offsets.numel() - 1,
            offsets.device,
            offsets_k is offsets,
            ("cu_seqlens", "cu_seqlens_k"),
            {offsets.device: (offsets, offsets_k)},
        )

    @classmethod
    def _from_host(
        cls,
        host: tuple[int, ...],
        host_k: tuple[int, ...],
        *,
        device: torch.device | None,
        offsets: tuple[Tensor, Tensor] | None = None,
        source: tuple[str, str] = ("sequences", "sequences"),
    ) -> PackedSequences:
        same = host_k is host or host_k == host
        known = {} if offsets is None or device is None else {device: offsets}
        longest = max(_differences(host), default=0)
        longest_k = longest if same else max(_differences(host_k), default=0)
        return cls(host, host if same else host_k, longest, longest_k, len(host) - 1, device, same, source, known)

    def _crossing(self) -> PackedSequences:
        """The same, able to cross a compiled graph; what is memoised for either is shared."""
        # What a tracer makes here are numbers of its program already.
        return self if torch.compiler.is_compiling() else replace(self, carrier=refer(self, kept=self))

    def __getstate__(self) -> dict[str, Any]:
        # What backends made for these is made again: it need not pickle.
        return {**self.__dict__, "carrier": None, "_memo": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of the carrier carries nothing.
        self.__dict__.update(state)
        twin = replace(self)
        self.__dict__["carrier"] = refer(twin, kept=twin)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Query length of each sequence; reads the device, and waits for it, where the host does not know them."""
        return _differences(self._host_or_read(0))

    @cached_property
    def lengths_k(self) -> tuple[int, ...]:
        """Key length of each sequence; reads the device where the host does not know them."""
        return self.lengths if self.equal_lengths else _differences(self._host_or_read(1))

    @property
    def cu_seqlens(self) -> Tensor:
        """Query offsets, int32 `[count + 1]`, on `device`."""
        return self.offsets(self.device or torch.device("cpu"))[0]

    @property
    def cu_seqlens_k(self) -> Tensor:
        """Key offsets, int32 `[count + 1]`, on `device`; the same tensor where keys are packed like queries."""
        return self.offsets(self.device or torch.device("cpu"))[1]

    @cached_property
    def uniform(self) -> bool:
        """All sequences are known to have the same lengths."""
        if self.cu_seqlens_host is None:
            return self.count <= 1
        return len(set(self.lengths)) <= 1 and len(set(self.lengths_k)) <= 1

    @cached_property
    def empty(self) -> tuple[int, ...]:
        """Indices of the sequences without queries or without keys; none where the host does not know the lengths."""
        if self.cu_seqlens_host is None:
            return ()
        pairs = zip(self.lengths, self.lengths_k, strict=True)
        return tuple(index for index, (queries, keys) in enumerate(pairs) if queries == 0 or keys == 0)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Indices of the other sequences, which have queries and keys."""
        empty = set(self.empty)
        return tuple(index for index in range(self.count) if index not in empty)

    @cached_property
    def signature(self) -> str:
        """What a bound call depends on, as text: made once, its hash too, so that a call only compares it."""
        totals: tuple[int, int] | None = None
        if self.cu_seqlens_host is not None and self.cu_seqlens_k_host is not None:
            totals = (self.cu_seqlens_host[-1], self.cu_seqlens_k_host[-1])
        shape = (self.count, self.max_seqlen, self.max_seqlen_k, self.equal_lengths, self.uniform)
        return repr((totals, shape, bool(self.empty), self.device))

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cu_seqlens, cu_seqlens_k) on `device`, int32, copied there once and without waiting."""
        if device not in self._offsets:
            assert self.cu_seqlens_host is not None
            assert self.cu_seqlens_k_host is not None
            with torch.inference_mode(False):
                first = _to_device(self.cu_seqlens_host, device)
                second = first if self.equal_lengths else _to_device(self.cu_seqlens_k_host, device)
            self._offsets[device] = (first, second)
        return self._offsets[device]

    def without_empty(self) -> PackedSequences:
        """The same without the sequences that have neither queries nor keys; the tensors stay as they are.

        Raises:
            InvalidAttentionInputError: a sequence is empty on one side only: its rows would stay behind.
        """
        for index in self.empty:
            if self.lengths[index] or self.lengths_k[index]:
                raise InvalidAttentionInputError(
                    "sequences",
                    f"sequence {index} with {self.lengths[index]} queries and {self.lengths_k[index]} keys",
                    "for without_empty, sequences that are empty on both sides or on neither",
                    "HAL_ATTN_EMPTY_SEQUENCES=compact answers it exactly",
                )
        return self.of_alive()

    def of_alive(self) -> PackedSequences:
        """The sequences that have queries and keys, packed without the rows of the others."""
        lengths_k = None if self.equal_lengths else [self.lengths_k[index] for index in self.alive]
        return PackedSequences.from_lengths(
            [self.lengths[index] for index in self.alive], lengths_k, device=self.device
        )

    def check_tensors(self, query: Tensor, key: Tensor) -> None:
        """Raises InvalidAttentionInputError unless the offsets end at the last rows of these, on their device."""
        if self.device is not None and self.device != query.device:
            raise InvalidAttentionInputError(
                self.source[0].removesuffix("_host"),
                f"offsets on device {self.device}",
                f"the device of query, {query.device}",
                "make the sequences with device=query.device, or from lengths without a device",
            )
        hosts = (self.cu_seqlens_host, self.cu_seqlens_k_host)
        for argument, host, tensor, side in zip(self.source, hosts, (query, key), ("query", "key"), strict=True):
            if host is not None and host[-1] != tensor.shape[0]:
                raise InvalidAttentionInputError(
                    argument,
                    f"offsets that end at {host[-1]}",
                    f"the token count of {side}, {tensor.shape[0]}",
                    "offsets are cumulative lengths with a leading 0",
                )

    def check_against_device(self) -> None:
        """Raises InvalidAttentionInputError where host and device offsets differ; waits for the device."""
        if self.cu_seqlens_host is None or self.cu_seqlens_k_host is None:
            return
        for offsets in self._offsets.values():
            pairs = zip(offsets, (self.cu_seqlens_host, self.cu_seqlens_k_host), ("", "_k"), strict=True)
            for tensor, host, side in pairs:
                found = tuple(tensor.tolist())
                if found != host:
                    raise InvalidAttentionInputError(
                        f"cu_seqlens{side}_host", str(_short(host)), f"the device's offsets, {_short(found)}"
                    )

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once for these sequences and `key`: plans and metadata that all layers share."""
        try:
            return self._memo[key]  # type: ignore[return-value]
        except KeyError:
            # Kept for later calls of any kind, so neither inference mode nor a default device may mark what is made.
            with torch.inference_mode(False), torch.device("cpu"):
                made = make()
            self._memo[key] = made
            return made

    def _host_or_read(self, side: int) -> tuple[int, ...]:
        host = (self.cu_seqlens_host, self.cu_seqlens_k_host)[side]
        return host if host is not None else tuple(next(iter(self._offsets.values()))[side].tolist())


def pack(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[B, S, ...]` padded at the end -> `[T, ...]` with the first `lengths[b]` rows of each `b`."""
    if len(lengths) != tensor.shape[0]:
        raise InvalidAttentionInputError("lengths", f"{len(lengths)} lengths", f"the batch, {tensor.shape[0]}")
    if max(lengths, default=0) > tensor.shape[1]:
        raise InvalidAttentionInputError("lengths", f"a length of {max(lengths)}", f"at most {tensor.shape[1]} rows")
    lengths = _differences(_accumulate("lengths", lengths))
    parts = [tensor[index, :length] for index, length in enumerate(lengths)]
    return torch.cat(parts) if parts else tensor.reshape(0, *tensor.shape[2:])


def unpack(tensor: Tensor, lengths: Sequence[int], padding: float = 0.0) -> Tensor:
    """`[T, ...]` -> `[B, max(lengths), ...]`, each sequence followed by rows of `padding`."""
    lengths = _differences(_accumulate("lengths", lengths))
    if sum(lengths) != tensor.shape[0]:
        raise InvalidAttentionInputError("lengths", f"a sum of {sum(lengths)}", f"the rows, {tensor.shape[0]}")
    if not lengths:
        return tensor.reshape(0, 0, *tensor.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(tensor.split(list(lengths))), batch_first=True, padding_value=padding)


def rows_of(lengths: Sequence[int], keep: Sequence[bool]) -> Tensor:
    """Indices of the packed rows of the sequences to keep, on the CPU."""
    flags = torch.tensor(keep, dtype=torch.bool, device="cpu")
    return flags.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device="cpu")).nonzero().flatten()


def check_offsets(name: str, offsets: object) -> Tensor:
    """`offsets` as a contiguous int32 tensor; raises InvalidAttentionInputError for what cannot be offsets."""
    allowed = "a 1-D int32 or int64 tensor of cumulative lengths, starting at 0"
    if not isinstance(offsets, Tensor):
        remedy = "host offsets go in PackedSequences.from_lengths(lengths)"
        raise InvalidAttentionInputError(name, f"a {type(offsets).__name__}", allowed, remedy)
    if offsets.dtype not in _INTEGERS:
        raise InvalidAttentionInputError(name, f"dtype {offsets.dtype}", allowed)
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise InvalidAttentionInputError(name, f"shape {tuple(offsets.shape)}", allowed)
    if offsets.dtype == torch.int64 and offsets.device.type == "cpu" and int(offsets.abs().max()) >= 2**31:
        raise InvalidAttentionInputError(name, f"an offset of {int(offsets.abs().max())}", "offsets below 2**31")
    return offsets.to(torch.int32).contiguous()


def host_offsets(name: str, offsets: Sequence[int] | Tensor) -> tuple[int, ...]:
    """Offsets as a tuple, checked: they start at 0 and never fall."""
    if isinstance(offsets, Tensor):
        check_offsets(name, offsets)
        values = tuple(offsets.tolist())
    elif isinstance(offsets, Sequence) and not isinstance(offsets, str):
        values = tuple(offsets)
    else:
        raise InvalidAttentionInputError(name, repr(offsets), "offsets: a tuple or list of whole numbers")
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise InvalidAttentionInputError(name, str(_short(values)), "whole numbers")
    if not values or values[0] != 0:
        raise InvalidAttentionInputError(
            name,
            f"offsets {_short(values)}",
            "offsets that start at 0",
            "plain lengths go in PackedSequences.from_lengths(lengths)",
        )
    for index, (before, after) in enumerate(itertools.pairwise(values)):
        if after < before:
            raise InvalidAttentionInputError(name, f"{before} then {after} at {index}", "offsets that never fall")
    return values


def _accumulate(name: str, lengths: Sequence[int]) -> tuple[int, ...]:
    allowed = "whole numbers of at least 0, on the host"
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or lengths.dtype not in _INTEGERS or lengths.dim() != 1:
            got = f"a {lengths.dim()}-D {lengths.dtype} tensor on {lengths.device}"
            raise InvalidAttentionInputError(name, got, allowed)
        lengths = lengths.tolist()
    elif not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise InvalidAttentionInputError(name, repr(lengths), f"a tuple or list of {allowed}")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidAttentionInputError(name, repr(length), allowed)
    return tuple(itertools.accumulate(lengths, initial=0))


def _differences(offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(after - before for before, after in itertools.pairwise(offsets))


def _check_counts(count: int, count_k: int, name: str) -> None:
    if count != count_k:
        raise InvalidAttentionInputError(name, f"{count_k} sequences", f"as many as the queries have, {count}")


def _to_device(host: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(torch.tensor(host, dtype=torch.int32, device="cpu"), device)


def _short(values: tuple[int, ...]) -> tuple[object, ...]:
    return values if len(values) <= 8 else (*values[:4], "...", *values[-2:])
