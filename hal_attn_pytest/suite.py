"""What pytest collects for `--hal-attn-backend`."""

from hal_attn.testing.plugin import BackendConformance


class TestConformance(BackendConformance):
    """The backends that the option names."""
