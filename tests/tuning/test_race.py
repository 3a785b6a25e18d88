"""The race: who wins under noise, drift and failure, by samples that are made up and exact."""

import itertools
import random
from collections import Counter

import pytest

from hal_attn.tuning.race import BUDGET, FEWEST_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS, SAMPLE, TOLERANCE, race


class Track:
    """Samples of `milliseconds` by name, times `spread` of the n-th sample; what was asked for is kept."""

    def __init__(self, milliseconds, spread=lambda name, count: 1.0):
        self.milliseconds, self.spread = milliseconds, spread
        self.samples = Counter()
        self.calls = {}
        self.order = []

    def __call__(self, name, calls):
        self.samples[name] += 1
        self.calls[name] = calls
        self.order.append(name)
        return self.milliseconds[name] * self.spread(name, self.samples[name])

    def outcome(self):
        return race(list(self.milliseconds), self)

    def winner(self):
        times = self.outcome().milliseconds
        return min(times, key=times.get)


def test_without_noise_the_fastest_wins_at_once():
    track = Track({"a": 1.1, "b": 1.0, "c": 1.15})
    outcome = track.outcome()
    assert outcome.milliseconds == pytest.approx({"a": 1.1, "b": 1.0, "c": 1.15})
    assert outcome.rounds == LEAST_ROUNDS
    assert outcome.failures == {}


def test_two_that_are_alike_end_too():
    assert Track({"a": 1.0, "b": 1.0}).outcome().rounds == LEAST_ROUNDS


@pytest.mark.parametrize("names", [[], ["alone"]])
def test_nobody_to_race_against(names):
    outcome = race(names, lambda name, calls: 1.0)
    assert outcome.milliseconds == dict.fromkeys(names, 1.0)
    assert outcome.rounds <= FEWEST_ROUNDS


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_noise_rarely_chooses_wrongly_by_more_than_the_tolerance(noise):
    wrong = 0
    for seed in range(200):
        draw = random.Random(seed)
        times = {name: 1 + draw.uniform(0, 0.08) for name in "abcd"}
        track = Track(times, lambda name, count, draw=draw: 1 + abs(draw.gauss(0, noise)))
        wrong += times[track.winner()] > min(times.values()) * (1 + TOLERANCE)
    assert wrong <= 2


def test_more_noise_takes_more_rounds():
    rounds = {0.002: [], 0.05: []}
    for noise, seed in itertools.product(rounds, range(20)):
        draw = random.Random(seed)
        track = Track({"a": 1.0, "b": 1.005}, lambda name, count, n=noise, d=draw: 1 + abs(d.gauss(0, n)))
        rounds[noise].append(track.outcome().rounds)
    assert set(rounds[0.002]) == {LEAST_ROUNDS}
    assert LEAST_ROUNDS < max(rounds[0.05]) <= MOST_ROUNDS
    assert sum(rounds[0.05]) > 2 * sum(rounds[0.002])


def test_a_slow_first_call_loses_nothing():
    track = Track({"a": 1.2, "b": 1.0}, lambda name, count: 9.0 if (name, count) == ("b", 1) else 1.0)
    assert track.winner() == "b"


def test_a_clock_that_slows_down_meets_all_alike():
    state = {"n": 0}

    def drift(name, count):
        state["n"] += 1
        return 1 + state["n"] / 10

    assert Track({"a": 1.03, "b": 1.0, "c": 1.06}, drift).winner() == "b"


def test_everyone_begins_a_round():
    track = Track({"a": 1.0, "b": 1.0, "c": 1.0}, lambda name, count: 1 + (count % 3) / 10)
    track.outcome()
    rounds = [track.order[index : index + 3] for index in range(9, len(track.order), 3)]
    assert {names[0] for names in rounds} == set("abc")
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)


def test_the_hopeless_are_only_looked_at():
    track = Track({"a": 1.0, "b": 50.0})
    assert track.outcome().milliseconds["b"] == pytest.approx(50.0)
    assert track.samples["b"] == 1
    assert track.samples["a"] > 3


def test_short_calls_are_timed_in_a_row_and_long_ones_alone():
    track = Track({"short": SAMPLE / 8})
    track.outcome()
    assert track.calls["short"] == 8
    track = Track({"long": SAMPLE * 3})
    track.outcome()
    assert track.calls["long"] == 1


def test_long_calls_end_with_the_budget():
    track = Track({"a": BUDGET, "b": BUDGET * 1.01})
    assert track.outcome().rounds == FEWEST_ROUNDS


@pytest.mark.parametrize("at", [1, 5])
def test_one_that_fails_is_out(at):
    def spread(name, count):
        if name == "b" and count >= at:
            raise RuntimeError("no kernel image")
        return 1.0

    outcome = Track({"a": 2.0, "b": 1.0, "c": 1.9}, spread).outcome()
    assert outcome.failures == {"b": "RuntimeError: no kernel image"}
    assert outcome.milliseconds == pytest.approx({"a": 2.0, "c": 1.9})
