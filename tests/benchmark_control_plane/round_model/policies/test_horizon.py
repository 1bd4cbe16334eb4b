"""The table of predicted use equals eq. 5 of MC-SF evaluated at every completion."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_control_plane.round_model.policies.exact_plan import ExactPlan, PlannedJob
from benchmark_control_plane.round_model.policies.horizon import Horizon
from benchmark_control_plane.round_model.policies.step_policy import Candidate

BUDGET = 30


def fits(running: list[tuple[Candidate, int]], new: Candidate, step: int) -> bool:
    """Eq. 5 literally: use at every predicted completion; an overdue request needs one more token."""
    stays = [(c.prompt, p, max(c.predicted, step + 1 - p)) for c, p in (*running, (new, step))]
    ends = {p + o for _, p, o in stays}
    return all(sum(s + t - p for s, p, o in stays if p < t <= p + o) <= BUDGET for t in ends if t > step)


candidates = st.builds(
    lambda prompt, predicted: (prompt, min(predicted, BUDGET - prompt)), st.integers(0, 8), st.integers(1, 30)
)


@settings(deadline=None)
@given(
    asked=st.lists(candidates, min_size=1, max_size=40),
    actions=st.lists(st.sampled_from(["step", "finish", "ask", "ask"]), max_size=120),
)
def test_delay_and_headroom_agree_with_the_definition(
    asked: list[tuple[int, int]], actions: list[str]
) -> None:
    horizon = Horizon(BUDGET)
    running: list[tuple[Candidate, int]] = []
    queue = [Candidate(i, 0, s, o) for i, (s, o) in enumerate(asked)]
    step = 0
    horizon.advance(step)
    for action in actions:
        if action == "step":
            step += 1
            horizon.advance(step)
        elif action == "finish" and running:
            done = next((pair for pair in running if pair[1] < step), None)
            if done is not None:
                running.remove(done)
                horizon.remove(done[0], step)
        elif action == "ask" and queue:
            new = queue[0]
            expected = fits(running, new, step)
            assert (horizon.delay(new, step) == 0) == expected
            assert (horizon.headroom(step, new.predicted)[-1] >= new.prompt) == expected
            plan = ExactPlan(horizon.levels(step), [PlannedJob(new.prompt, new.predicted)], BUDGET)
            assert (plan.starting_now() == 1) == expected
            if expected:
                horizon.add(queue.pop(0), step)
                running.append((new, step))


def test_delay_is_never_too_long() -> None:
    horizon = Horizon(BUDGET)
    horizon.advance(0)
    horizon.add(Candidate(0, 0, 4, 20), 0)
    new = Candidate(1, 0, 2, 15)
    step = 0
    while delay := horizon.delay(new, step):
        for waited in range(1, delay):
            assert horizon.delay(new, step + waited) > 0
        step += delay
    assert 0 < step <= 20


def test_table_keeps_its_entries_when_it_moves() -> None:
    horizon = Horizon(10_000)
    long = Candidate(0, 0, 1, 1500)
    for step in range(0, 6000, 1500):
        horizon.advance(step)
        horizon.add(long, step)
        horizon.advance(step + 1400)
        assert horizon.levels(step + 1400)[-1] == 1501 + 99
        horizon.remove(long, step + 1500)
