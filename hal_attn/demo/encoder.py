"""The encoder: BERT in plain PyTorch over packed sentences, with `hal_attn.varlen_attention` in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hal_attn
from hal_attn.demo.model import EncoderConfig, load_config, load_weights

# Our names of a layer's parts, and the checkpoint's.
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")


@dataclass(frozen=True)
class PackedBatch:
    """Sentences one after another, without padding: T tokens of N sentences.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, each token's place in its sentence.
        owners: `[T]` int64, each token's sentence.
        sequences: where each sentence begins and ends; every layer shares it.
    """

    token_ids: Tensor
    positions: Tensor
    owners: Tensor
    sequences: hal_attn.PackedSequences

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], device: torch.device) -> PackedBatch:
        """The packed batch of these token ids."""
        lengths = [len(ids) for ids in sentences]
        return cls(
            torch.tensor([token for ids in sentences for token in ids]).to(device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device),
            hal_attn.PackedSequences.from_lengths(lengths, device=device),
        )


class Layer(nn.Module):
    """One post-norm transformer layer over packed tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.project = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.expand, self.contract = nn.Linear(size, inner), nn.Linear(inner, size)
        self.output_norm = nn.LayerNorm(size, config.layer_norm_eps)

    def query_key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, hidden]` -> three of `[T, H, D]`."""
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        return (
            query.unflatten(-1, (self.heads, -1)),
            key.unflatten(-1, (self.heads, -1)),
            value.unflatten(-1, (self.heads, -1)),
        )

    def forward(
        self, hidden: Tensor, sequences: hal_attn.PackedSequences, backend: str | Sequence[str] | None
    ) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        attended = hal_attn.varlen_attention(*self.query_key_value(hidden), sequences=sequences, backend=backend)
        assert isinstance(attended, Tensor)
        hidden = self.attention_norm(hidden + self.project(attended.flatten(-2)))
        return self.output_norm(hidden + self.contract(F.gelu(self.expand(hidden))))  # type: ignore[no-any-return]


class PackedEncoder(nn.Module):
    """Sentences to unit vectors: the layers, then the mean over each sentence's tokens, scaled to length 1.

    Args:
        backend: a backend's name, or names in order, as for `varlen_attention`; None lets `hal_attn` choose.
    """

    def __init__(self, config: EncoderConfig, backend: str | Sequence[str] | None = None) -> None:
        super().__init__()
        size = config.hidden_size
        self.backend = backend
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(2, size)
        self.embedding_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    @classmethod
    def from_folder(
        cls, folder: Path, device: torch.device, backend: str | Sequence[str] | None = None
    ) -> PackedEncoder:
        """The encoder with the weights in `folder`, on `device`."""
        config = load_config(folder)
        encoder = cls(config, backend)
        encoder.load_state_dict(_rename(load_weights(folder), config.num_hidden_layers))
        return encoder.to(device).eval()

    def embed(self, batch: PackedBatch) -> Tensor:
        """What the first layer sees, `[T, hidden]`."""
        # All text is of the first of the model's two token types.
        embedded = self.word_embeddings(batch.token_ids) + self.token_type_embeddings.weight[0]
        return self.embedding_norm(embedded + self.position_embeddings(batch.positions))  # type: ignore[no-any-return]

    def forward(self, batch: PackedBatch) -> Tensor:
        """Unit vectors, `[N, hidden]`.

        Raises:
            UnsupportedAttentionError, BackendNotAvailableError: as `varlen_attention`.
        """
        hidden = self.embed(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch.sequences, self.backend)
        sums = hidden.new_zeros(batch.sequences.count, hidden.shape[-1]).index_add_(0, batch.owners, hidden)
        counts = torch.tensor(batch.sequences.lengths, dtype=hidden.dtype, device=hidden.device)
        return F.normalize(sums / counts.unsqueeze(-1), dim=-1)

    def explain(self, batch: PackedBatch) -> hal_attn.Selection:
        """The selection for the attention of the first layer over `batch`, on its real tensors."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        query, key, value = layer.query_key_value(self.embed(batch))
        return hal_attn.explain(query, key, value, sequences=batch.sequences, backend=self.backend)


def _rename(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names; its pooler and its table of positions have no use here."""
    parts = {name: f"embeddings.{name}" for name in _EMBEDDINGS}
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in parts.items()}
    parts = {"embedding_norm": "embeddings.LayerNorm"}
    for index in range(layers):
        parts |= {f"layers.{index}.{ours}": f"encoder.layer.{index}.{theirs}" for ours, theirs in _LAYER.items()}
    names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in parts.items() for kind in ("weight", "bias")}
    return {ours: weights[theirs] for ours, theirs in names.items()}
