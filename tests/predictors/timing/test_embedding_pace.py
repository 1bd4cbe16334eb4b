"""The pace of embedding passes: a constant part and a part per token."""

from random import Random

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.core.clock import Duration, Instant, after, milliseconds, seconds
from controlplane.core.pool_view import Pace
from predictors.timing.embedding_pace import ModelPaces, PassPace

LIMIT = 16_000
FIXED_MS, TOKEN_MS = 15.0, 0.003


def observed(sizes, *, noise=0.0, stalls=0.0, seed=1) -> PassPace:
    random, pace = Random(seed), PassPace(LIMIT)
    for size in sizes:
        took = (FIXED_MS + TOKEN_MS * size) * random.lognormvariate(0, noise)
        pace.observe_pass(size, milliseconds(took * (40 if random.random() < stalls else 1)))
    return pace


def test_both_parts_are_found():
    random = Random(2)
    pace = observed([random.randint(4, 3_000) for _ in range(100)], noise=0.1).pace
    assert pace.step == pytest.approx(milliseconds(FIXED_MS), rel=0.1)
    # What does not fit in one pass has the constant part again.
    assert pace.per_prompt_token == pytest.approx(milliseconds(TOKEN_MS + FIXED_MS / LIMIT), rel=0.15)


def test_a_stall_is_clipped():
    random = Random(3)
    sizes = [random.randint(4, 3_000) for _ in range(300)]
    pace = observed(sizes, stalls=0.02).pace
    whole = pace.step + 3_000 * pace.per_prompt_token
    assert whole == pytest.approx(milliseconds(FIXED_MS + 3_000 * TOKEN_MS), rel=0.3)


def test_passes_of_one_size_show_no_constant_part():
    pace = observed([2_000] * 20).pace
    assert pace.step == 0
    assert 2_000 * pace.per_prompt_token == pytest.approx(milliseconds(FIXED_MS + 2_000 * TOKEN_MS), rel=1e-3)


def test_no_part_is_negative():
    pace = PassPace(LIMIT)
    for size, took in ((100, 1), (1_000, 20), (2_000, 50), (100, 1)):
        pace.observe_pass(size, milliseconds(took))
    assert pace.pace.step == 0 and pace.pace.per_prompt_token > 0
    shrinking = PassPace(LIMIT)
    for size, took in ((100, 50), (1_000, 40), (2_000, 30)):
        shrinking.observe_pass(size, milliseconds(took))
    assert shrinking.pace.step > 0
    assert shrinking.pace.per_prompt_token == pytest.approx(shrinking.pace.step / LIMIT, rel=0.01)


@pytest.mark.parametrize(
    ("pause_s", "took_ms", "expected_ms"),
    [
        # Passes took 300 ms. One of 50 ms after 20 times as long makes them count as one.
        (6.1, 50, 175),
        (5.9, 50, 296),
        # One of 200 ms does not contradict them.
        (6.1, 200, 298),
    ],
)
def test_a_much_faster_pass_after_a_long_pause_replaces_what_is_known(pause_s, took_ms, expected_ms):
    pace, now = PassPace(LIMIT), Instant(seconds(10))
    for _ in range(300):
        now = after(now, milliseconds(300))
        pace.observe_pass(1_000, milliseconds(300), ended=now)
    now = after(now, seconds(pause_s) + milliseconds(took_ms))
    pace.observe_pass(1_000, milliseconds(took_ms), ended=now)
    assert pace.pace.step + 1_000 * pace.pace.per_prompt_token == pytest.approx(
        milliseconds(expected_ms), rel=0.01
    )


def test_nothing_is_known_before_the_first_pass():
    pace = PassPace(LIMIT)
    pace.observe_pass(0, Duration(5))
    assert pace.pace is None


def test_passes_may_take_no_time():
    pace = PassPace(LIMIT)
    pace.observe_pass(10, Duration(0))
    assert pace.pace == Pace(Duration(0), Duration(0))


def full_pass(paces) -> float:
    return paces.pace.step + 3_200 * paces.pace.per_prompt_token


def test_embedding_models_start_from_their_profile():
    models = [ScriptedEmbedder(token_seconds=cost, max_input_tokens=100) for cost in (1e-4, 3e-4)]
    pace = ModelPaces(models)
    assert pace.pace.per_prompt_token == pytest.approx(seconds(2e-4), rel=5e-3)
    # A full pass dominates: the start-up profile was measured without an LLM on the device.
    pace.observe_pass(8, milliseconds(8), model=None)
    pace.observe_pass(3_200, milliseconds(1_280), model=None)
    assert full_pass(pace) == pytest.approx(milliseconds(1_280), rel=0.1)
    for _ in range(8):
        pace.observe_pass(3_200, milliseconds(3_200), model=None)
    assert full_pass(pace) == pytest.approx(milliseconds(3_200), rel=0.1)
    assert ModelPaces([ScriptedEmbedder()]).pace is None, "nothing is known of its time"


def test_steps_of_the_llm_that_vary_more_than_the_passes_leave_the_time_per_token_of_an_idle_device():
    random, errors = Random(5), []
    for _ in range(40):
        pace = PassPace(LIMIT, idle_per_token=float(milliseconds(TOKEN_MS)))
        for _ in range(64):
            size, step_ms = random.randint(1_000, 8_000), random.expovariate(1 / 80)
            pace.observe_pass(size, milliseconds(step_ms + TOKEN_MS * size))
        found = pace.pace
        errors.append(abs(found.per_prompt_token - found.step / LIMIT - milliseconds(TOKEN_MS)))
    # Least squares alone is wrong by more than the time per token on average.
    assert sum(errors) / len(errors) < 0.4 * milliseconds(TOKEN_MS)


def test_a_token_that_takes_longer_beside_the_llm_is_learned():
    random, pace = Random(6), PassPace(LIMIT, idle_per_token=float(milliseconds(TOKEN_MS)))
    for _ in range(64):
        size = random.randint(100, 8_000)
        pace.observe_pass(size, milliseconds(FIXED_MS + 3 * TOKEN_MS * size + random.gauss(0, 3)))
    assert pace.pace.per_prompt_token == pytest.approx(milliseconds(3 * TOKEN_MS + FIXED_MS / LIMIT), rel=0.1)


def test_passes_of_one_size_have_the_time_per_token_of_an_idle_device():
    pace = PassPace(LIMIT, idle_per_token=float(milliseconds(TOKEN_MS)))
    for _ in range(20):
        pace.observe_pass(2_000, milliseconds(FIXED_MS + 2_000 * TOKEN_MS))
    assert pace.pace.step == pytest.approx(milliseconds(FIXED_MS), rel=1e-3)


def test_a_pass_is_compared_with_what_was_expected_before_it():
    pace = PassPace(limit=1_000)
    pace.observe_pass(100, milliseconds(10))
    assert pace.calibration.ratio is None
    pace.observe_pass(100, milliseconds(15))
    assert (pace.calibration.ratio, pace.calibration.error) == (pytest.approx(1.5), pytest.approx(0.5))
