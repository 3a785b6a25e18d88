"""Fake platforms and backends, the door through which the public functions see them, and the shape of a refusal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hal_attn_cpu.math import CpuMathBackend
from hal_attn_cpu.platform import CpuPlatform
from torch import Tensor

from hal_attn import memo, settings
from hal_attn import registry as registry_module
from hal_attn.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from hal_attn.capabilities import Capabilities
from hal_attn.errors import InvalidAttentionInputError
from hal_attn.platform import Detection, DeviceInfo, Platform
from hal_attn.refusal import Refusal
from hal_attn.registry import Registry
from hal_attn.request import AttentionRequest

EVERYTHING = CpuMathBackend.capabilities
FLOAT32 = Capabilities(dtypes=frozenset({torch.float32}))


def claims(**changes: object) -> Capabilities:
    """All that `cpu_math` claims, but for `changes`."""
    return replace(EVERYTHING, **changes)


class FakeBackend(AttentionBackend):
    """A backend without hooks; `calls` holds the options of each call that reached one in a subclass.

    `missing` is what `unavailable` returns, or raises where it is an exception.
    """

    def __init__(
        self,
        name: str,
        capabilities: Capabilities = EVERYTHING,
        *,
        missing: Refusal | Exception | None = None,
        install: str = "",
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.install = install
        self.missing = missing
        self.asked = 0
        self.calls: list[dict[str, object]] = []

    def unavailable(self) -> Refusal | None:
        self.asked += 1
        if isinstance(self.missing, Exception):
            raise self.missing
        return self.missing


class BatchedFake(FakeBackend):
    """Only `forward`, answered by the CPU's math backend."""

    def forward(self, query, key, value, **options):
        self.calls.append(options)
        return CpuMathBackend().forward(query, key, value, **options)


class SGLangFake(FakeBackend):
    """The two hooks exactly as a backend for SGLang writes them: nothing but its parameters, no `**options`."""

    def forward_varlen(self, query, key, value, *, cu_seqlens, max_seqlen, cu_seqlens_host=None):
        self.calls.append({"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cu_seqlens_host": cu_seqlens_host})
        lengths = torch.diff(cu_seqlens).tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([_one_sequence(*part) for part in parts])

    def forward_ring_kv_chunk(self, query, key, value):
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


class PackedFake(SGLangFake):
    """Packed attention with metadata of its own; `builder.built` counts how often it was made."""

    def __init__(self, name: str, capabilities: Capabilities = FLOAT32, **others: object) -> None:
        super().__init__(name, capabilities, **others)
        self.builder = CountingBuilder()

    def forward_varlen(self, query, key, value, *, metadata, **offsets):
        result = super().forward_varlen(query, key, value, **offsets)
        self.calls[-1]["metadata"] = metadata
        return result

    def metadata_builder(self) -> AttentionMetadataBuilder:
        return self.builder


class CountingBuilder(AttentionMetadataBuilder):
    """Counts the batches that it prepared."""

    def __init__(self) -> None:
        self.built = 0

    def build(self, sequences, request: AttentionRequest) -> AttentionMetadata:
        self.built += 1
        return super().build(sequences, request)


def _one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (query, key, value))).transpose(0, 1)


class FakePlatform(Platform):
    """A vendor's platform with these backends in this order.

    `detects` is what `detect` returns, or raises where it is an exception; `rules` what `validate` returns.
    """

    api_version = 1

    def __init__(
        self,
        name: str,
        *backends: AttentionBackend,
        device_type: str = "cpu",
        detects: Detection | Exception | None = None,
        rules: tuple[Refusal, ...] = (),
        rejects_empty_sequences: bool = False,
        api_version: int = 1,
        simulated: Platform | None = None,
    ) -> None:
        self.name = name
        self.device_type = device_type
        self.process_group_backend = "gloo"
        self.rejects_empty_sequences = rejects_empty_sequences
        self.api_version = api_version
        self.asked = 0
        self._backends = backends
        self._detects = detects or Detection(True, "a fake device is here", versions=(("fake", "1.0"),))
        self._rules = rules
        self._simulated = simulated

    def detect(self) -> Detection:
        self.asked += 1
        if isinstance(self._detects, Exception):
            raise self._detects
        return self._detects

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(f"{self.device_type}:0", f"{self.name} device"),)

    def backends(self) -> tuple[AttentionBackend, ...]:
        return self._backends

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        return tuple(backend.name for backend in self._backends)

    def validate(self, request: AttentionRequest) -> tuple[Refusal, ...]:
        return self._rules

    def simulation(self, generation: str | None) -> Platform | None:
        return self._simulated


ABSENT = Detection(False, "no device of it is here", "plug one in")


def registry_of(*platforms: Platform) -> Registry:
    """A registry of these platforms, in this order."""
    return Registry({platform.name: _giving(platform) for platform in platforms})


def _giving(platform: Platform) -> Callable[[], object]:
    return lambda: lambda: platform


class _Door:
    """Stands for `default_registry`: gives the fakes of the test that is running, else the installed platforms.

    A module that is first imported while it stands there keeps it, and has to see no fake of a test that is over.
    """

    installed = staticmethod(registry_module.default_registry)
    cache_clear = staticmethod(registry_module.default_registry.cache_clear)
    shown: Registry | None = None

    def __call__(self) -> Registry:
        return self.installed() if self.shown is None else self.shown


_DOOR = _Door()


def install(monkeypatch: pytest.MonkeyPatch, *platforms: Platform, registry: Registry | None = None) -> Registry:
    """Let all of hal_attn see these platforms and no others, with no call remembered, until the test ends."""
    made = registry or registry_of(*platforms)
    monkeypatch.setattr(_DOOR, "shown", made)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hal_attn" and vars(module).get("default_registry") is _DOOR.installed:
            monkeypatch.setattr(module, "default_registry", _DOOR)
    _forget(monkeypatch)
    return made


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_bound", "_recent"):
        monkeypatch.setattr(memo, name, {})


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, *backends: AttentionBackend, **options: object) -> FakePlatform:
    """A fake platform "fake" that owns CPU tensors and has these backends, with the real CPU platform behind it."""
    platform = FakePlatform("fake", *backends, **options)
    install(monkeypatch, platform, CpuPlatform())
    return platform


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """No call and no warning of another test is remembered; import it to have it."""
    _forget(monkeypatch)
    settings._parse.cache_clear()
    yield
    settings._parse.cache_clear()


def refused(argument, got, call, *arguments, **options):
    """The message of the refusal of `argument`, which names it, what it was (`got`) and what is allowed."""
    with pytest.raises(InvalidAttentionInputError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert caught.value.argument == argument, message
    assert message.startswith(f"{argument}: got ")
    assert got in message.split("; allowed: ")[0]
    assert message.split("; allowed: ")[1].strip()
    return message
