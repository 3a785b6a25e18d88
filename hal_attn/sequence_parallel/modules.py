"""A plan as a module, for models that are built of modules: the options of a layer, kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from hal_attn.backend import AttentionResult
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.sequence_parallel.plan import Plan


class PlannedAttention(nn.Module):
    """`plan.attention` with the options of one layer. `plan` may be set anew for each batch shape.

    Args:
        sinks: `[H]`, a parameter where it is to be trained.

    Raises:
        InvalidAttentionInputError: a plan whose groups exchange something else than this class is named for.
    """

    modes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        plan: Plan,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | nn.Parameter | None = None,
        deterministic: bool = False,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.softcap, self.deterministic, self.backend = scale, softcap, deterministic, backend
        if isinstance(sinks, nn.Parameter):
            self.sinks: Tensor | None = sinks
        else:
            self.register_buffer("sinks", sinks)
        self.plan = plan

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        if plan.groups.size > 1 and plan.groups.mode not in self.modes:
            allowed = " or ".join(self.modes) or "of one rank"
            raise InvalidAttentionInputError(
                "plan", f"a plan by {plan.groups.mode}", f"a plan {allowed}, or of one rank"
            )
        self._plan = plan

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> AttentionResult:
        """This rank's rows of query, key and value, as `plan.shard` gives them -> its rows of the output."""
        return self.plan.attention(
            query,
            key,
            value,
            scale=self.scale,
            mask=mask,
            key_padding_mask=key_padding_mask,
            softcap=self.softcap,
            sinks=self.sinks,
            deterministic=self.deterministic,
            return_lse=return_lse,
            backend=self.backend,
        )


class LocalAttention(PlannedAttention):
    """One rank holds everything: all tokens, all heads, nothing travels."""


class UlyssesAttention(PlannedAttention):
    """Ranks exchange heads for tokens: each computes some heads of whole sequences.

    ```
    tokens  0 1 2 | 3 4 | 5 6     rank  0  1  2      heads  h0 h1 | h2 | h3
    before: own tokens, all heads      while computing: all tokens, own heads      after: as before
    ```
    """

    modes = ("ulysses",)


class KVGatherAttention(PlannedAttention):
    """Ranks gather the keys that their queries see.

    ```
    causal, zigzag, 2 ranks       chunk  0 1 2 3
    queries of rank               0 1 1 0            rank 0 gathers chunks 1 2 (its chunk 3 sees them)
    keys of rank                  0 1 1 0            rank 1 gathers chunk 0; chunk 3 is seen by none of its queries
    ```
    """

    modes = ("kv_gather",)


class RingAttention(PlannedAttention):
    """Keys travel around a ring of ranks, hop by hop.

    ```
    queries stay    rank 0: q0    rank 1: q1    rank 2: q2
    keys, hop 0             k0            k1            k2
    keys, hop 1             k2            k0            k1
    keys, hop 2             k1            k2            k0
    ```
    """

    modes = ("ring",)


class USPAttention(PlannedAttention):
    """Ulysses within, a ring or a KV gather without: both exchanges at once.

    ```
    ulysses 2, ring 2     rank 0    rank 1    rank 2    rank 3
    holds tokens            t0        t1        t2        t3
    computes queries      t0 t1     t0 t1     t2 t3     t2 t3
    of heads              h0 h1     h2 h3     h0 h1     h2 h3      keys of t2 t3 reach ranks 0 and 1 by the ring
    ```
    """

    modes = ("ulysses x ring", "ulysses x kv_gather", "ulysses", "ring", "kv_gather")
