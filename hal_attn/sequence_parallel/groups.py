"""The ranks of sequence parallelism: how many exchange heads, how many exchange keys, and who is in which group.

```
ulysses=2, ring=2                 rank 0   rank 1   rank 2   rank 3
ring coordinate (keys travel)        0        0        1        1
ulysses coordinate (heads travel)    0        1        0        1      neighbours exchange heads, the dearer traffic
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hal_attn.errors import InvalidAttentionInputError
from hal_attn.sequence_parallel.agreement import agreed
from hal_attn.sequence_parallel.description import Layout, Masks, PerSequence
from hal_attn.sequence_parallel.peers import PeerCopies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hal_attn.sequence_parallel.plan import Plan

_NAMES = ("ring", "kv_gather", "ulysses")


@dataclass(frozen=True)
class SequenceParallelGroups:
    """This rank's place, and its process groups. Make it with `create`, on all ranks alike.

    Attributes:
        ulysses, ring, kv_gather: the degrees.
        exchange_rank, ulysses_rank: its coordinates, among those that exchange keys and those that exchange heads.
        everyone, exchanging, exchanging_heads: the process groups; None where this rank is alone.
        ranks: global ranks, by `exchange_rank * ulysses + ulysses_rank`.
        peer_copies: heads, keys, and gradients that go straight home, may go by copy engines between NVIDIA GPUs of one
            host.
    """

    ulysses: int
    ring: int
    kv_gather: int
    exchange_rank: int = 0
    ulysses_rank: int = 0
    everyone: dist.ProcessGroup | None = None
    exchanging: dist.ProcessGroup | None = None
    exchanging_heads: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)
    peer_copies: bool = False

    @cached_property
    def peers(self) -> PeerCopies | None:
        """The way between GPUs of one host for those that exchange keys; None for one rank, or where not asked for."""
        return self._copies(self.exchanging)

    @cached_property
    def peers_of_heads(self) -> PeerCopies | None:
        """The same for those that exchange heads."""
        return self._copies(self.exchanging_heads)

    def _copies(self, group: dist.ProcessGroup | None) -> PeerCopies | None:
        return PeerCopies(group) if self.peer_copies and group is not None else None

    @classmethod
    def create(
        cls,
        ulysses: int | None = None,
        ring: int | None = None,
        kv_gather: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        peer_copies: bool = False,
    ) -> SequenceParallelGroups:
        """Groups of these degrees (1 where not given) over `process_group`, by default all ranks; or those of a
        `DeviceMesh` whose dimensions are named "ring", "kv_gather", "ulysses" (any of them, in any order).

        Every rank of the group calls it, with the same degrees. With `peer_copies`, NVIDIA GPUs of one host send heads,
        keys, and gradients that go straight home by their copy engines instead of NCCL, where they can: under the
        attention, not after it. It keeps memory for two exchanges of the largest kind so far and an eighth more: the
        keys that a rank receives, or all rows of its heads. No timeout notices a rank that died.

        Raises:
            InvalidAttentionInputError: degrees that do not multiply to the number of ranks, that have no meaning
                together, or that differ between ranks; a mesh with other names or sizes.
        """
        if mesh is not None:
            asked = {"ulysses": ulysses, "ring": ring, "kv_gather": kv_gather}
            return _of_mesh(cls, mesh, asked, process_group, peer_copies)
        asked = dict(zip(_NAMES, (ring, kv_gather, ulysses), strict=True))
        if not (dist.is_available() and dist.is_initialized()):
            size = math.prod(_degrees(asked).values())
            if size == 1 and process_group is None:
                return cls(1, 1, 1)
            raise InvalidAttentionInputError(
                "process_group",
                "no process group: torch.distributed is not initialised",
                f"one of {size} ranks",
                "start with torchrun and call torch.distributed.init_process_group",
            )
        group = process_group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        # Making groups waits for their ranks, so all must mean the same ones.
        told = {"peer_copies": bool(peer_copies)}
        degrees, _ = agreed(group, lambda: _degrees(asked, len(ranks)), lambda found: {**found, **told})
        return cls._made(degrees, ranks, peer_copies)

    @classmethod
    def _made(cls, degrees: dict[str, int], ranks: Sequence[int], peer_copies: bool) -> SequenceParallelGroups:
        own, width = ranks.index(dist.get_rank()), degrees["ulysses"]
        exchange_rank, ulysses_rank = divmod(own, width)
        return cls(
            degrees["ulysses"],
            degrees["ring"],
            degrees["kv_gather"],
            exchange_rank,
            ulysses_rank,
            _group(ranks),
            _group(ranks[ulysses_rank::width]),
            _group(ranks[exchange_rank * width : (exchange_rank + 1) * width]),
            tuple(ranks),
            bool(peer_copies),
        )

    @property
    def exchange_degree(self) -> int:
        """Ranks that exchange keys."""
        return self.ring * self.kv_gather

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ulysses * self.exchange_degree

    @property
    def rank(self) -> int:
        """This rank among `ranks`."""
        return self.exchange_rank * self.ulysses + self.ulysses_rank

    @property
    def mode(self) -> str:
        """What travels: "local", "ulysses", "ring", "kv_gather", or two of them joined by " x "."""
        named = [name for name in ("ulysses", "ring", "kv_gather") if getattr(self, name) > 1]
        return " x ".join(named) or "local"

    def plan(
        self,
        lengths: Sequence[int] | None = None,
        lengths_k: Sequence[int] | None = None,
        *,
        batch: int | None = None,
        seqlen: int | None = None,
        seqlen_k: int | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] | None = None,
        layout: Layout = "auto",
        replicated_prefix: PerSequence = 0,
        replicated_suffix: PerSequence = 0,
        key_prefix: PerSequence = 0,
        masks: Masks = "whole",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Plan:
        """The plan for one batch shape: made once, run by every layer. All ranks call it, and agree or all raise.

        Args:
            lengths, lengths_k: query and key tokens of each packed sequence, everything replicated among them; keys as
                many as queries (and `key_prefix`) where not given.
            batch, seqlen, seqlen_k: a dense batch instead.
            causal, window_size: as in `attention`, aligned bottom right over whole sequences.
            layout: "contiguous", "zigzag" (equal causal work), or "auto", the one that suits; with it as few packed
                sequences are cut as leave the ranks balanced (within 1 part in 64 or a token), the others whole.
            replicated_prefix, replicated_suffix: tokens at both ends of each sequence that every rank holds, as queries
                and keys; one number or one for each sequence.
            key_prefix: keys before these that every rank holds and that have no query.
            masks: "whole", or "sharded": `mask` has this rank's query rows, `key_padding_mask` this rank's keys.
            num_heads, num_kv_heads, head_dim, value_head_dim, dtype, device: of the tensors to come, for `str(plan)`;
                checked against them where given.

        Raises:
            InvalidAttentionInputError: an argument is wrong, here or on another rank, or differs between ranks.
        """
        from hal_attn.sequence_parallel.plan import make_plan

        return make_plan(
            self,
            {"lengths": lengths, "lengths_k": lengths_k, "batch": batch, "seqlen": seqlen, "seqlen_k": seqlen_k},
            {
                "causal": causal,
                "window_size": window_size,
                "layout": layout,
                "replicated_prefix": replicated_prefix,
                "replicated_suffix": replicated_suffix,
                "key_prefix": key_prefix,
                "masks": masks,
            },
            {
                "num_heads": num_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "value_head_dim": value_head_dim,
                "dtype": dtype,
                "device": None if device is None else torch.device(device).type,
            },
        )


def _of_mesh(
    cls: type[SequenceParallelGroups],
    mesh: DeviceMesh,
    asked: dict[str, int | None],
    process_group: Any,
    peer_copies: bool,
) -> SequenceParallelGroups:
    names = mesh.mesh_dim_names or ()
    allowed = "dimensions named ring, kv_gather or ulysses, each once"
    if process_group is not None:
        raise InvalidAttentionInputError("process_group", "given beside mesh", "one of the two")
    if not names or set(names) - set(_NAMES) or len(set(names)) != len(names):
        raise InvalidAttentionInputError("mesh", f"dimensions {names or 'without names'}", allowed)
    degrees = {name: mesh.mesh.shape[names.index(name)] if name in names else 1 for name in _NAMES}
    for name, value in asked.items():
        if value is not None and value != degrees[name]:
            raise InvalidAttentionInputError(name, str(value), f"the size of the mesh's dimension, {degrees[name]}")
    _check_meaning(degrees)
    # Ulysses ranks next to one another, whatever the order of the mesh's dimensions.
    order = [names.index(name) for name in _NAMES if name in names]
    ranks = mesh.mesh.permute(order)
    for dim, name in enumerate(names[place] for place in order):
        if ranks.shape[dim] > 1 and not bool((ranks.diff(dim=dim) > 0).all()):
            # A process group has its ranks in rising order, and collectives count by it.
            have = f"ranks {mesh.mesh.tolist()}, which do not rise along {name}"
            raise InvalidAttentionInputError(
                "mesh", have, "ranks that rise along each dimension, as init_device_mesh's"
            )
    return cls._made(degrees, ranks.flatten().tolist(), peer_copies)


def _degrees(asked: Mapping[str, int | None], ranks: int | None = None) -> dict[str, int]:
    """The degrees that are `asked` for, checked; to multiply to `ranks` where given."""
    degrees = {}
    for name, value in asked.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidAttentionInputError(name, repr(value), "a whole number of at least 1")
        degrees[name] = 1 if value is None else value
    _check_meaning(degrees)
    size = math.prod(degrees.values())
    if ranks is not None and size != ranks:
        told = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise InvalidAttentionInputError(
            "ulysses, ring, kv_gather", f"{told}, together {size} ranks", f"the ranks of the group, {ranks}"
        )
    return degrees


def _check_meaning(degrees: dict[str, int]) -> None:
    if degrees["ring"] > 1 and degrees["kv_gather"] > 1:
        raise InvalidAttentionInputError(
            "ring, kv_gather",
            f"ring={degrees['ring']} and kv_gather={degrees['kv_gather']}",
            "one of them above 1: both bring keys to queries",
            "use either with ulysses",
        )


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of these ranks; None for one rank. Only they take part in making it."""
    if len(ranks) == 1:
        return None
    if list(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
