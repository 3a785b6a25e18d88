"""The conformance kit of hal_attn over each backend, on the device: each of its checks is a test."""

from hal_attn.testing.plugin import BackendConformance


class TestFused(BackendConformance):
    backend = "acme_fused"
    platform = "acme"


class TestPacked(BackendConformance):
    backend = "acme_packed"
    platform = "acme"


class TestPlain(BackendConformance):
    backend = "torch_math"
    platform = "acme"
