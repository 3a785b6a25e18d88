"""How often calls are timed, and that they take turns; what a clock shows is not looked at."""

import torch

from hal_attn.bench import timing
from hal_attn.bench.timing import Rounds

CPU = torch.device("cpu")


class Clock:
    """A clock that calls move."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def perf_counter(self):
        return self.now

    def call(self, name, seconds):
        def made():
            self.now += seconds
            self.calls.append(name)

        return made


def test_calls_take_turns_and_give_their_own_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    calls = {"slow": clock.call("slow", 0.25), "fast": clock.call("fast", 0.125)}
    found = timing.interleaved(CPU, calls, Rounds(1.0, 2, 100))
    assert found == {"slow": [250.0] * 4, "fast": [125.0] * 8}
    rounds = [clock.calls[place : place + 2] for place in range(4, 12, 2)]
    assert all(sorted(names) == ["fast", "slow"] for names in rounds)
    assert len({tuple(names) for names in rounds}) == 2


def test_a_short_call_is_made_several_times_in_a_sample(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    found = timing.interleaved(CPU, {"short": clock.call("short", 2**-12)}, Rounds(0.0, 3, 3))
    assert found == {"short": [1e3 / 2**12] * 3}
    assert len(clock.calls) == 2 + 3 * 8


def test_the_number_of_samples_is_bounded():
    rounds = Rounds(1.0, 3, 50)
    assert [rounds.of(ms) for ms in (1e-9, 1.0, 100.0, 1e6)] == [50, 50, 10, 3]


def test_the_peak_counts_what_a_call_holds_at_once():
    def call():
        first = torch.empty(1000)
        second = torch.empty(500)
        return first.sum() + second.sum()

    assert 4 * 1500 <= timing.peak_bytes(CPU, call) < 4 * 1500 + 1000
