"""Latencies count from the planned send time, which the seed alone decides."""

from itertools import pairwise

import pytest

from benchmark_control_plane.common.http_client import Address
from benchmark_control_plane.experiments.collocation import interference
from benchmark_control_plane.experiments.collocation.interference import CollocationLatencies, CollocationLoad
from benchmark_control_plane.experiments.collocation.server_pairs import Stack

LOAD = CollocationLoad(chats_per_second=200.0, chat_words=3, burst_interval=0.02)


async def planned(monkeypatch):
    """Seconds after the first at which the chats and bursts of a slice are due."""
    found = {"chats": [], "bursts": []}

    async def chat(connections, model, text, seen, objectives, seed, due):
        found["chats"].append(due)

    async def burst(connections, model, rng, seen, deadline, due):
        found["bursts"].append(due)

    monkeypatch.setattr(interference, "_chat", chat)
    monkeypatch.setattr(interference, "_burst", burst)
    stack = Stack("naive", Address("127.0.0.1", 9), Address("127.0.0.1", 9), "chat", "embed")
    await interference._slice(
        stack, CollocationLatencies(), {}, load=LOAD, seconds=0.1, deadline=1.0, seed=3, bursts=True
    )
    first = min(found["chats"])
    return {kind: [due - first for due in sorted(moments)] for kind, moments in found.items()}


async def test_two_slices_of_a_seed_have_the_same_moments(monkeypatch):
    first, second = await planned(monkeypatch), await planned(monkeypatch)
    assert len(first["chats"]) > 5
    for kind, moments in first.items():
        assert second[kind] == pytest.approx(moments, abs=1e-6)
    gaps = [after - at for at, after in pairwise(first["bursts"])]
    assert gaps == pytest.approx([0.02] * 4, abs=1e-6)


def test_the_objectives_are_halfway_between_chat_alone_and_beside_bursts():
    alone = CollocationLatencies(ttft=[0.010, 0.020], tpot=[0.002, 0.004])
    beside = CollocationLatencies(ttft=[0.010, 0.060], tpot=[0.002, 0.010])
    assert interference._objectives(alone, beside) == pytest.approx(
        {"x-slo-ttft-ms": 40.0, "x-slo-tpot-ms": 7.0}
    )


def test_a_chat_is_in_time_if_it_meets_both_objectives():
    seen = CollocationLatencies(
        ttft=[0.01, 0.03, 0.01], tpot=[0.002, 0.002, 0.009], bursts=[0.5], burst_seconds=1.0
    )
    seen.gaps, seen.chat_failed = [0.001], 1
    found = interference._figures(seen, 1.0, {"x-slo-ttft-ms": 20.0, "x-slo-tpot-ms": 5.0})
    assert (found["chat_attainment"], found["burst_attainment"]) == (0.25, 1.0)
