"""A change is undone if a class loses more attainment than allowed, and only then."""

import asyncio

import pytest

from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import Instant
from controlplane.core.decision import Outcome
from controlplane.service.attainment_windows import AttainmentWindows
from controlplane.service.runtime.change_guard import ChangeGuard, GuardState
from controlplane.service.runtime.timers import LoopClock


def counted(history: AttainmentWindows, met: int, missed: int, now: Instant, name: str = "gold") -> None:
    for outcome, count in ((Outcome.MET, met), (Outcome.REJECTED, missed)):
        for _ in range(count):
            history.count(name, outcome, now)


def watched(
    before: tuple[int, int],
    after: tuple[int, int],
    *,
    drop: float | None = 3.0,
    error: Exception | None = None,
    is_temporary: bool = False,
    classes: tuple[str, ...] = ("gold",),
) -> tuple[ChangeGuard, list[str], float]:
    """The guard after its end, what it undid, and the seconds that it took."""
    undone: list[str] = []
    ended: list[tuple[ChangeGuard, GuardState, int]] = []

    def end(guard: ChangeGuard) -> None:
        ended.append((guard, guard.state, len(undone)))

    async def undo(reason: str) -> None:
        undone.append(reason)
        if error is not None:
            raise error

    async def main() -> tuple[ChangeGuard, list[str], float]:
        clock, history = LoopClock(), AttainmentWindows()
        counted(history, *before, clock.now())
        await asyncio.sleep(30)
        guard = ChangeGuard(
            2, 60.0, drop, classes, history, clock.now, undo, is_temporary=is_temporary, on_end=end
        )
        guard.start()
        begin = clock.now()
        await asyncio.sleep(0.5)
        counted(history, *after, clock.now())
        assert guard._task is not None
        await guard._task
        # Once, after the undoing and with what came of it.
        assert ended == [(guard, guard.state, len(undone))]
        return guard, undone, (clock.now() - begin) / 1e9

    return run(main())


@pytest.mark.parametrize(
    ("before", "after", "state", "took"),
    [
        # 20 of 100 points: far beyond chance.
        ((1_000, 0), (80, 20), GuardState.ROLLED_BACK, 1.0),
        # 10 points, which 40 requests may lose by chance: judged at the end.
        ((900, 100), (32, 8), GuardState.ROLLED_BACK, 60.0),
        # 2 points are allowed.
        ((1_000, 0), (98, 2), GuardState.KEPT, 60.0),
        # Too few requests.
        ((1_000, 0), (0, 19), GuardState.KEPT, 60.0),
        ((19, 0), (0, 100), GuardState.KEPT, 60.0),
        # Better than before.
        ((50, 50), (100, 0), GuardState.KEPT, 60.0),
    ],
)
def test_what_is_undone_and_when(before, after, state, took):
    guard, undone, seconds_taken = watched(before, after)
    assert (guard.state, bool(undone)) == (state, state is GuardState.ROLLED_BACK)
    assert seconds_taken == pytest.approx(took)
    assert guard.reason


@pytest.mark.parametrize(
    ("before", "after", "classes", "reason", "names"),
    [
        ((100, 0), (100, 0), ("gold",), "no class lost more than 3 points", []),
        (
            (1_000, 0),
            (0, 19),
            ("gold",),
            "no class was judged, with fewer than 20 requests before or since the change: "
            "gold (1,000 before, 19 since)",
            ["gold"],
        ),
        (
            (100, 0),
            (100, 0),
            ("gold", "silver"),
            "no judged class lost more than 3 points; not judged, with fewer than 20 requests before or "
            "since the change: silver (0 before, 0 since)",
            ["silver"],
        ),
    ],
)
def test_a_class_that_is_not_judged_is_named(before, after, classes, reason, names):
    guard, _, _ = watched(before, after, classes=classes)
    assert (guard.reason, guard.to_json()["not_judged"]) == (reason, names)
    guard, _, _ = watched(before, after, classes=classes, is_temporary=True)
    assert guard.reason == f"the change was for 60 s; {reason}"


def test_of_many_classes_that_are_not_judged_the_first_are_named():
    names = tuple(f"class-{number}" for number in range(13))
    guard, _, _ = watched((100, 0), (100, 0), classes=("gold", *names))
    assert guard.reason.endswith("class-9 (0 before, 0 since), 3 more")
    assert guard.to_json()["not_judged"] == list(names)


@pytest.mark.parametrize(
    ("after", "drop", "state", "took"),
    [
        # Undone at the end of its time, however the classes do.
        ((100, 0), None, GuardState.EXPIRED, 60.0),
        ((0, 1_000), None, GuardState.EXPIRED, 60.0),
        ((98, 2), 3.0, GuardState.EXPIRED, 60.0),
        # Watched too: undone early.
        ((80, 20), 3.0, GuardState.ROLLED_BACK, 1.0),
    ],
)
def test_a_temporary_change_is_undone_once_at_the_latest_when_its_time_is_over(after, drop, state, took):
    guard, undone, seconds_taken = watched((1_000, 0), after, drop=drop, is_temporary=True)
    assert (guard.state, len(undone)) == (state, 1)
    assert seconds_taken == pytest.approx(took)


def test_what_ends_after_the_guard_is_not_the_changes():
    """An undone change was shown with the attainment of the version that replaced it."""
    guard, _, _ = watched((100, 0), (0, 100))
    counted(guard.history, 900, 0, guard.history._samples[-1][0])
    assert guard.to_json()["since"] == {"gold": {"percent": 0.0, "requests": 100}}


def test_an_undo_that_fails_is_shown():
    guard, undone, _ = watched((100, 0), (0, 100), error=RuntimeError("no engine"))
    assert guard.state is GuardState.FAILED
    assert guard.reason == f"{undone[0]}; undoing the change failed: no engine"
    assert guard.to_json()["since"] == {"gold": {"percent": 0.0, "requests": 100}}


def test_a_guard_that_cannot_read_attainment_says_so(monkeypatch):
    def lost(guard, *, is_last):
        raise RuntimeError("no counts")

    monkeypatch.setattr(ChangeGuard, "_lost", lost)
    guard, undone, took = watched((1_000, 0), (80, 20))
    assert guard.state is GuardState.FAILED and undone == [] and took == 1.0
    assert guard.reason == "the guard stopped: RuntimeError('no counts'); nothing is undone"
