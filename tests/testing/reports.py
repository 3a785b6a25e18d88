"""Reports made by hand: small machines with a failure, refusals, what did not run, and signs that HTML must escape."""

from __future__ import annotations

from hal_attn.testing import FEATURES, BackendReport, Check, Coverage, PlatformReport, Report

HOSTILE = 'have <script>alert("x")</script> & <b>bold</b>, need no markup'


def check(backend: str, feature: str, status: str = "passed", platform: str = "cpu", **others: object) -> Check:
    """One check; a passed one has an error of a fifth of what is allowed."""
    facts: dict[str, object] = {
        "backend": backend,
        "platform": platform,
        "feature": feature,
        "rule": "precision",
        "name": f"{feature}, 2 sequences",
        "request": "packed 2 sequences, 12 queries, 4 heads, dim 32, float32, cpu",
        "seconds": 0.25,
        "status": status,
    }
    if status == "passed":
        facts |= {"error": 2e-7, "allowed": 1e-6}
    if status == "refused":
        facts |= {"rule": "refused by name", "message": f"{feature}: have given, need off"}
    if status == "not run":
        facts |= {"message": "there is no device that could be waited for"}
    return Check(**{**facts, **others})


def backend(
    name: str, *checks: Check, platform: str = "cpu", simulated: bool = False, only_peers: tuple[str, ...] = ()
) -> BackendReport:
    """An available backend. Features that no check names get one that passed."""
    named = {found.feature for found in checks}
    rest = tuple(check(name, feature, platform=platform) for feature in FEATURES if feature not in named)
    coverage = Coverage(claimed=tuple(FEATURES), only_peers=only_peers)
    return BackendReport(
        name=name,
        platform=platform,
        simulated=simulated,
        available=True,
        checks=(*checks, *rest),
        coverage=coverage,
    )


def missing(name: str, platform: str = "cpu", reason: str = "the library flashy is not installed") -> BackendReport:
    """A backend that is not available, and what to do."""
    return BackendReport(
        name=name,
        platform=platform,
        simulated=False,
        available=False,
        reason=reason,
        remedy=f"install it with: pip install {name}",
    )


def here(
    name: str = "cpu", *, simulated: bool = False, device: str = "a fake device", **versions: str
) -> PlatformReport:
    """A platform with one device, beside PyTorch and libraries of these versions."""
    return PlatformReport(
        name=name,
        simulated=simulated,
        available=True,
        reason="a fake device is here",
        devices=(("cpu" if simulated else f"{name}:0", device, ""),),
        versions=(("torch", "2.13.0"), *versions.items()),
    )


def away(name: str) -> PlatformReport:
    """A platform without a device."""
    return PlatformReport(
        name=name, simulated=False, available=False, reason=f"no device of {name} is here", remedy="plug one in"
    )


def report(*parts: PlatformReport | BackendReport, effort: str = "quick", **facts: str) -> Report:
    """A report of these platforms and backends."""
    machine = {"system": "Linux x86_64", "processor": "a processor, 2 cores", "torch": "2.13.0", **facts}
    return Report(
        machine=tuple(machine.items()),
        effort=effort,
        platforms=tuple(part for part in parts if isinstance(part, PlatformReport)),
        backends=tuple(part for part in parts if isinstance(part, BackendReport)),
        seconds=12.5,
    )


def good() -> Report:
    """One real platform; one backend refuses windows, nothing fails."""
    window = check("steady", "window", "refused")
    return report(here(), backend("steady", window, check("steady", "no waiting", "not run")), backend("wide"))


def mixed() -> Report:
    """A failure, refusals, hostile text, a simulated platform, one that is away and a backend that is not installed."""
    failed = check(
        "shaky",
        "LSE",
        "failed",
        rule="LSE",
        name="LSE, 3 sequences",
        message="the LSE is in base 2: got 1.4427, allowed 1.0 within 1e-06\nit looks like log2 instead of log",
        error=0.4427,
        allowed=1e-6,
    )
    limits = [check("shaky", "window", "refused", name=f"window {width}", message=HOSTILE) for width in range(12)]
    some = (check("steady", "causal"), check("steady", "causal", "refused", name="other lengths"))
    return report(
        here(),
        away("cuda"),
        here("rocm", simulated=True, device="MI300X <gfx942>"),
        backend("shaky", failed, *limits, only_peers=("window",)),
        backend("steady", *some, check("steady", "no waiting", "not run")),
        missing("absent_kernels"),
        missing("flash_attn_3", "cuda", "no device of cuda is here"),
        backend("aiter", check("aiter", "sinks", "refused", platform="rocm"), platform="rocm", simulated=True),
        backend("aiter_triton_kernels", platform="rocm", simulated=True),
    )
