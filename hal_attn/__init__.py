"""Attention written once, run on NVIDIA, AMD and Huawei Ascend accelerators and on the CPU."""

from hal_attn.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from hal_attn.capabilities import Capabilities
from hal_attn.errors import (
    BackendNotAvailableError,
    ConfigurationError,
    HalAttnError,
    InvalidAttentionInputError,
    UnsupportedAttentionError,
)
from hal_attn.functional import attention, explain, select_backend, varlen_attention
from hal_attn.inventory import backends, platforms
from hal_attn.operators import OPERATORS as _OPERATORS  # noqa: F401
from hal_attn.packing import PackedSequences, pack, unpack
from hal_attn.padded import run_padded_attention
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.reference import reference_attention, reference_varlen_attention
from hal_attn.refusal import Refusal
from hal_attn.request import AttentionRequest
from hal_attn.selection import Selection, use_backend
from hal_attn.states import merge_attention_states

__version__ = "0.1.0"

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionRequest",
    "BackendNotAvailableError",
    "Capabilities",
    "ConfigurationError",
    "Detection",
    "DeviceInfo",
    "HalAttnError",
    "InvalidAttentionInputError",
    "PackedSequences",
    "Platform",
    "Refusal",
    "Selection",
    "UnsupportedAttentionError",
    "attention",
    "backends",
    "explain",
    "merge_attention_states",
    "pack",
    "platforms",
    "reference_attention",
    "reference_varlen_attention",
    "run_padded_attention",
    "select_backend",
    "unpack",
    "use_backend",
    "varlen_attention",
]
