"""Who decides the backend: `backend=`, then `use_backend`, then HAL_ATTN_BACKEND, then the platform's order."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import (
    BackendNotAvailableError,
    InvalidAttentionInputError,
    UnsupportedAttentionError,
    attention,
    explain,
    select_backend,
    use_backend,
    varlen_attention,
)
from hal_attn.refusal import Refusal
from tests.fakes import ABSENT, BatchedFake, FakePlatform, claims, fresh, install, on_the_cpu  # noqa: F401
from tests.support import dense, packed

NAMES = ("cpu_flash", "cpu_sdpa", "cpu_math")
MISSING = Refusal("installed", "no package vendorlib", "vendorlib 2 or later")


def chosen(**options):
    return select_backend(*dense(), **options).name


def test_the_nearest_wins(monkeypatch):
    assert chosen() == "cpu_flash"
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    assert chosen() == "cpu_math"
    with use_backend("cpu_sdpa"):
        assert chosen() == "cpu_sdpa"
        assert chosen(backend="cpu_flash") == "cpu_flash"
        assert explain(*dense()).source == "use_backend cpu_sdpa"
        assert explain(*dense(), backend="cpu_flash").source == "backend cpu_flash"
    assert explain(*dense()).source == "HAL_ATTN_BACKEND cpu_math"


def test_the_nearest_serves_the_call(monkeypatch):
    fakes = {name: BatchedFake(name) for name in "abcd"}
    on_the_cpu(monkeypatch, *fakes.values())
    query, key, value, sequences = packed([3, 2])

    def served(**options):
        for fake in fakes.values():
            fake.calls.clear()
        attention(*dense(), **options)
        varlen_attention(query, key, value, sequences=sequences, **options)
        (name,) = (name for name, fake in fakes.items() if fake.calls)
        return name

    for _ in range(2):
        assert served() == "a"
        with monkeypatch.context() as patch:
            patch.setenv("HAL_ATTN_BACKEND", "b")
            assert served() == "b"
            with use_backend("c"):
                assert served() == "c"
                assert served(backend="d") == "d"
            assert served() == "b"


@pytest.mark.parametrize("backend", ["cpu_math", ("cpu_math",), ["cpu_math"], ("cpu_math", "cpu_flash")])
def test_backend_takes_a_name_or_names_in_order(backend):
    assert chosen(backend=backend) == "cpu_math"
    assert attention(*dense(), backend=backend).shape == dense()[0].shape


def test_names_are_tried_in_order():
    assert chosen(backend=("cpu_flash", "cpu_math"), softcap=1.0) == "cpu_math"
    with use_backend("cpu_flash", "cpu_sdpa", "cpu_math"):
        assert chosen(dropout_p=0.5) == "cpu_sdpa"
        assert explain(*dense(), dropout_p=0.5).source == "use_backend cpu_flash,cpu_sdpa,cpu_math"


def test_use_backend_nests_and_ends():
    with use_backend("cpu_math"):
        with use_backend("cpu_sdpa"):
            assert chosen() == "cpu_sdpa"
        assert chosen() == "cpu_math"
        with pytest.raises(RuntimeError, match="inner"), use_backend("cpu_sdpa"):
            raise RuntimeError("inner")
        assert chosen() == "cpu_math"
    assert chosen() == "cpu_flash"


def test_use_backend_without_names_brings_the_default_order_back(monkeypatch):
    with use_backend("cpu_math"), use_backend():
        assert chosen() == "cpu_flash"
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    with use_backend():
        assert chosen() == "cpu_flash"


def test_two_threads_have_overrides_of_their_own(monkeypatch):
    fakes = {name: BatchedFake(name) for name in "abc"}
    on_the_cpu(monkeypatch, *fakes.values())
    both = threading.Barrier(2)

    def work(name):
        names = []
        with use_backend(name):
            for _ in range(20):
                both.wait(10)
                attention(*dense())
                names.append(chosen())
        return names

    with use_backend("c"), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, "ab"))
        assert chosen() == "c"
    assert results == [["a"] * 20, ["b"] * 20]
    assert [len(fake.calls) for fake in fakes.values()] == [20, 20, 0]


def test_a_new_thread_starts_without_the_override_of_another():
    with use_backend("cpu_math"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen).result() == "cpu_flash"


def test_two_tasks_have_overrides_of_their_own(monkeypatch):
    fakes = {name: BatchedFake(name) for name in "abc"}
    on_the_cpu(monkeypatch, *fakes.values())

    async def work(name):
        names = []
        with use_backend(name):
            for _ in range(20):
                await asyncio.sleep(0)
                attention(*dense())
                names.append(chosen())
        return names

    async def both():
        with use_backend("c"):
            inherited = asyncio.create_task(_chosen_later())
            results = await asyncio.gather(work("a"), work("b"))
            return results, await inherited, chosen()

    results, inherited, after = asyncio.run(both())
    assert results == [["a"] * 20, ["b"] * 20]
    assert (inherited, after) == ("c", "c")
    assert [len(fake.calls) for fake in fakes.values()] == [20, 20, 0]


async def _chosen_later():
    await asyncio.sleep(0)
    return chosen()


@pytest.mark.parametrize("name", ["cpu_mth", "unheard_of", "", 3, ["cpu_math"]])
def test_use_backend_of_an_unknown_name(name):
    with pytest.raises(InvalidAttentionInputError) as caught, use_backend("cpu_math", name):
        pytest.fail("an unknown name was let in")
    assert caught.value.argument == "use_backend"
    assert f"unknown backend {name!r}; allowed: one of " in str(caught.value)
    assert "cpu_flash, cpu_sdpa, cpu_math" in str(caught.value)
    assert ("did you mean cpu_math?" in str(caught.value)) == (name in ("cpu_mth", ["cpu_math"]))
    assert chosen() == "cpu_flash"


def test_backend_of_an_unknown_name():
    with pytest.raises(InvalidAttentionInputError) as caught:
        attention(*dense(), backend=("cpu_math", "cpu_flush"))
    assert caught.value.argument == "backend"
    assert "did you mean cpu_flash?" in str(caught.value)


@pytest.mark.parametrize("how", ["backend=", "use_backend", "HAL_ATTN_BACKEND"])
def test_a_backend_that_refuses_says_every_rule(how, monkeypatch):
    query, key, value = dense(2, 5, 7)
    slopes = query.new_zeros(4)
    options = {"causal": True, "softcap": 2.0, "window_size": (1, 3), "alibi_slopes": slopes, "dropout_p": 0.25}

    def call():
        if how == "backend=":
            return attention(query, key, value, backend="cpu_flash", **options)
        if how == "use_backend":
            with use_backend("cpu_flash"):
                return attention(query, key, value, **options)
        monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_flash")
        return attention(query, key, value, **options)

    with pytest.raises(UnsupportedAttentionError) as caught:
        call()
    ((name, refusals),) = caught.value.refusals
    assert name == "cpu_flash"
    assert {refusal.rule for refusal in refusals} >= {"causal", "window_size", "softcap", "alibi_slopes", "dropout_p"}
    message = str(caught.value)
    assert all(f"    - {refusal}" in message for refusal in refusals)
    assert f"by {how.rstrip('=')} cpu_flash" in message
    assert "HAL_ATTN_FALLBACK" in message


def test_every_named_backend_says_why():
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(), softcap=1.0, backend=["cpu_sdpa", "cpu_flash"])
    assert [name for name, _ in caught.value.refusals] == ["cpu_sdpa", "cpu_flash"]


def test_what_the_platform_itself_refuses_is_among_the_reasons(monkeypatch):
    rule = Refusal("head_dim", "16", "a multiple of 32 on this device")
    platform = FakePlatform("fake", BatchedFake("one", claims(softcap=False)), rules=(rule,))
    install(monkeypatch, platform)
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(), softcap=1.0)
    assert [refusal.rule for refusal in caught.value.refusals[0][1]] == ["head_dim", "softcap"]


@pytest.mark.parametrize("backend", ["one", ("one", "two")])
def test_a_backend_that_is_not_installed(backend, monkeypatch):
    on_the_cpu(
        monkeypatch,
        BatchedFake("ready"),
        BatchedFake("one", missing=MISSING, install="pip install vendorlib"),
        BatchedFake("two", missing=OSError("libvendor.so.2: cannot open"), install="pip install --pre vendorlib"),
    )
    for _ in range(2):
        with pytest.raises(BackendNotAvailableError) as caught:
            attention(*dense(), backend=backend)
        message = str(caught.value)
        assert "one: installed: have no package vendorlib, need vendorlib 2 or later" in message
        assert "install it with: pip install vendorlib" in message
        if backend != "one":
            assert "two: installed: have broken: OSError: libvendor.so.2: cannot open" in message
            assert "pip install --pre vendorlib" in message
    assert chosen(backend=("one", "ready")) == "ready"
    assert chosen() == "ready"


def test_one_missing_and_one_that_refuses_shows_both(monkeypatch):
    missing = BatchedFake("one", missing=MISSING, install="pip install vendorlib")
    on_the_cpu(monkeypatch, missing, BatchedFake("two", claims(softcap=False)))
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(), softcap=1.0, backend=("one", "two"))
    assert "no package vendorlib" in str(caught.value)
    assert "pip install vendorlib" in str(caught.value)
    assert "softcap: have 1.0, need off" in str(caught.value)


def test_a_missing_library_is_looked_for_once(monkeypatch):
    missing = BatchedFake("one", missing=MISSING)
    on_the_cpu(monkeypatch, missing, BatchedFake("ready"))
    for seqlen in range(1, 5):
        attention(*dense(1, seqlen))
    assert missing.asked == 1


@pytest.mark.parametrize("detects", [None, ABSENT])
def test_a_backend_of_another_platform(detects, monkeypatch):
    vendor = FakePlatform("vendor", BatchedFake("vendor_kernel"), device_type="npu", detects=detects)
    install(monkeypatch, vendor, CpuPlatform())
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense(), backend="vendor_kernel")
    message = str(caught.value)
    assert "platform: have tensors of cpu on cpu, need vendor" in message
    assert ("no device of it is here" in message) == (detects is ABSENT)
    assert chosen(backend=("vendor_kernel", "cpu_math")) == "cpu_math"


def test_a_backend_that_was_handed_over_is_the_one_that_runs(monkeypatch):
    """Of two backends of one name the registered one never answers for the one given; a refusal is right too."""
    registered, mine = BatchedFake("one"), BatchedFake("one")
    on_the_cpu(monkeypatch, registered)
    with suppress(InvalidAttentionInputError):
        attention(*dense(), backend=mine)
    assert len(registered.calls) == 0


def test_select_backend_raises_as_the_call_does():
    for call in (attention, select_backend):
        with pytest.raises(UnsupportedAttentionError, match="cpu_flash"):
            call(*dense(), softcap=1.0, backend="cpu_flash")
    selection = explain(*dense(), softcap=1.0, backend="cpu_flash")
    assert selection.chosen is None
    assert "chosen    none, by backend cpu_flash" in str(selection)


@pytest.mark.parametrize("name", NAMES)
def test_every_cpu_backend_can_be_named(name):
    assert chosen(backend=name) == name
    with use_backend(name):
        assert explain(*dense()).chosen.name == name
