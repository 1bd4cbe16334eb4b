"""Clock, objectives, phases and timelines."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import (
    Duration,
    Instant,
    after,
    between,
    milliseconds,
    scaled,
    seconds,
    to_milliseconds,
    to_seconds,
)
from controlplane.core.request import LEGAL_MOVES, IllegalTransition, Kind, Owner, Phase, Timeline, moved
from controlplane.core.slo import Slo
from tests.example_requests import a_request

durations = st.integers(-(10**15), 10**15).map(Duration)


@given(st.integers(0, 10**18).map(Instant), durations)
def test_instants_and_durations_agree(start: Instant, elapsed: Duration) -> None:
    assert between(start, after(start, elapsed)) == elapsed
    assert between(after(start, elapsed), start) == -elapsed


@given(st.integers(-(10**9), 10**9))
def test_milliseconds_convert_exactly(value: int) -> None:
    assert to_milliseconds(milliseconds(value)) == value
    assert seconds(value) == milliseconds(1_000 * value)
    assert to_seconds(seconds(value / 1_000)) == value / 1_000
    assert scaled(seconds(value), 0.5) == seconds(value / 2)


def test_objectives_override_one_by_one() -> None:
    default = Slo(ttft=seconds(1), tpot=milliseconds(50))
    assert default.overridden(Slo(ttft=seconds(2))) == Slo(seconds(2), milliseconds(50), None)
    assert default.overridden(Slo()) == default


@pytest.mark.parametrize(
    ("slo", "deadline"),
    [
        (Slo(ttft=Duration(7), e2e=Duration(5)), 105),
        (Slo(ttft=Duration(7)), 107),
        (Slo(tpot=Duration(7)), None),
    ],
)
def test_the_first_deadline_is_the_earlier_of_ttft_and_e2e(slo: Slo, deadline: int | None) -> None:
    assert a_request(slo=slo, arrival=Instant(100)).first_deadline == deadline


@pytest.mark.parametrize("part", ["ttft", "tpot", "e2e"])
@pytest.mark.parametrize("value", [0, -1])
def test_objectives_are_positive(part: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"slo\.{part}={value}.*leave it out"):
        Slo(**{part: Duration(value)})


@pytest.mark.parametrize(("phase", "to"), list(product(Phase, Phase)))
def test_only_legal_phase_moves_are_allowed(phase: Phase, to: Phase) -> None:
    if to in LEGAL_MOVES[phase]:
        assert moved(phase, to) is to
    else:
        with pytest.raises(IllegalTransition, match=f"{phase} -> {to}"):
            moved(phase, to)


def test_every_phase_can_finish_and_finished_is_final() -> None:
    for phase in Phase:
        assert (Phase.FINISHED in LEGAL_MOVES[phase]) == (phase is not Phase.FINISHED)
    assert LEGAL_MOVES[Phase.FINISHED] == frozenset()


def test_kinds_have_owners() -> None:
    assert {kind: kind.owner for kind in Kind} == {Kind.GENERATE: Owner.LLM, Kind.EMBED: Owner.EMBEDDING}


def test_timeline_of_a_generation() -> None:
    seen = Timeline(arrival=Instant(1_000), dispatched=Instant(1_500))
    for now, tokens in ((2_000, 1), (2_100, 1), (2_900, 2)):
        seen.stamp_tokens(Instant(now), tokens)
    seen.finished = Instant(3_000)
    assert (seen.queue, seen.ttft, seen.tpot, seen.e2e) == (500, 1_000, 300, 2_000)
    assert seen.gap == seen.longest_gap == 800
    assert seen.objectives_met(Slo(Duration(1_000), Duration(299))) == {"ttft": True, "tpot": False}
    assert seen.objectives_met(Slo(gap=Duration(799), e2e=Duration(2_000))) == {"e2e": True, "gap": False}
    assert seen.has_missed(Slo(gap=Duration(799))) and seen.has_missed(Slo(ttft=Duration(999)))
    assert not seen.has_missed(Slo(tpot=Duration(1), e2e=Duration(1)))


def test_one_token_meets_tpot_and_embeddings_meet_ttft_at_their_end() -> None:
    seen = Timeline(arrival=Instant(0))
    seen.stamp_tokens(Instant(50), 1)
    seen.finished = Instant(60)
    assert seen.tpot is None
    assert seen.objectives_met(Slo(tpot=Duration(1), gap=Duration(1))) == {"tpot": True, "gap": True}
    answer = Timeline(arrival=Instant(0), dispatched=Instant(20), finished=Instant(90))
    assert answer.measured(Kind.EMBED)["ttft"] == 90
    assert Timeline(arrival=Instant(0), finished=Instant(90)).measured(Kind.EMBED)["ttft"] is None
    assert answer.measured(Kind.GENERATE) == {"ttft": None, "tpot": None, "e2e": 90, "gap": None}
    assert answer.objectives_met(Slo(ttft=Duration(89))) == {"ttft": False}
    assert answer.objectives_met(Slo(ttft=Duration(90))) == {"ttft": True}
