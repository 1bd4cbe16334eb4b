"""Plans are exact and in order, and a change is kept only if the sum of starts does not rise."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.round_model.policies.exact_plan import ExactPlan, PlannedJob

BUDGET = 20

stays = st.lists(
    st.builds(lambda s, o: PlannedJob(s, min(o, BUDGET - s)), st.integers(0, 6), st.integers(1, 20)),
    min_size=2,
    max_size=9,
)


def brute(order: list[PlannedJob]) -> list[int]:
    """Earliest starts, none before its predecessor, by testing every step."""
    use: dict[int, int] = {}
    starts: list[int] = []
    at = 0
    for stay in order:
        while any(use.get(at + k, 0) + stay.prompt + k > BUDGET for k in range(1, stay.steps + 1)):
            at += 1
        for k in range(1, stay.steps + 1):
            use[at + k] = use.get(at + k, 0) + stay.prompt + k
        starts.append(at)
    return starts


@settings(deadline=None)
@given(listed=stays, data=st.data())
def test_starts_are_the_earliest_after_every_change(listed: list[PlannedJob], data: st.DataObject) -> None:
    plan = ExactPlan([0], listed, BUDGET)
    total = sum(brute(listed))
    place = st.integers(0, len(listed) - 1)
    for _ in range(12):
        one, other = data.draw(place), data.draw(place)
        before = plan.order
        change = plan.swap if data.draw(st.booleans()) else plan.move
        change(one, other)
        starts = brute([listed[at] for at in plan.order])
        assert sorted(plan.order) == list(range(len(listed)))
        assert sum(starts) <= total
        assert plan.starting_now() == starts.count(0)
        if plan.order == before:
            assert sum(starts) == total
        total = sum(starts)
