"""The incrementally updated columns of running requests equal a full scan."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vllm.plugin.batch_view import BatchTracker, is_ending, require_one_group
from backends.vllm.plugin.request_metadata import Defaults, make_engine_request
from controlplane.core.clock import Instant
from controlplane.core.forecast import LengthForecast

BLOCK = 16
MOST = 64


def arrived(number: int, prompt: int) -> SimpleNamespace:
    """The attributes of a vLLM request that are read."""
    facts = {"request_id": f"r{number}", "prompt_tokens": prompt, "max_tokens": 100, "now": Instant(number)}
    return SimpleNamespace(
        request_id=f"r{number}",
        tandem=make_engine_request({}, Defaults(), **facts),
        _all_token_ids=[0] * prompt,
        num_computed_tokens=0,
        num_output_placeholders=0,
        spec_token_ids=[],
    )


def expected_growth(running: list[SimpleNamespace]) -> int:
    asked = 0
    for one in running:
        done = one.num_computed_tokens
        known = len(one._all_token_ids) + one.num_output_placeholders
        asked += max(0, -(-min(known, done + MOST) // BLOCK) + (-done // BLOCK))
    return asked


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("takes_back", [False, True])
@given(random=st.randoms(use_true_random=True), is_notified=st.booleans())
def test_incremental_columns_equal_a_full_scan(random, runs_ahead, takes_back, is_notified):
    tracker = BatchTracker(BLOCK, has_packed=False, runs_ahead=runs_ahead, takes_back=takes_back)
    running: list[SimpleNamespace] = []
    for number in range(30):
        now = Instant(1_000 + number)
        if runs_ahead:
            for one in running:
                one.num_output_placeholders = random.randrange(2)
        # With pipeline parallelism a step may be in flight even without drafts and KV transfers.
        is_in_flight = random.random() < 0.2
        for one in running:
            if one.num_computed_tokens == len(one._all_token_ids) and not is_in_flight:
                one._all_token_ids.append(0)
            elif takes_back and random.random() < 0.1:
                one.num_computed_tokens -= random.randrange(one.num_computed_tokens + 1)
        tracker.stamp(running, now, is_in_flight=is_in_flight)
        assert tracker.growth(MOST) == expected_growth(running)
        assert list(tracker.batch) == [one.tandem for one in running]
        assert all(one.tandem.tokens == len(one._all_token_ids) for one in running)
        if running and random.random() < 0.2:
            changed = random.choice(running).tandem
            changed.set_forecast(LengthForecast((0.0, 1.0), (10.0, random.choice([20.0, 200.0]))))
            tracker.set_forecast(changed)
        assert tracker.batch.remaining_tokens().tolist() == [one.tandem.remaining() for one in running]
        assert all(one.tandem.held == -(-one.num_computed_tokens // BLOCK) for one in running)
        for one in random.sample(running, random.randrange(len(running) + 1) // 3):
            running.remove(one)
            if is_notified:
                tracker.remove(one.tandem)
        running += [
            arrived(100 * number + more, random.randint(1, 150)) for more in range(random.randrange(3))
        ]
        # Most steps compute one token per request; some skip a request or split a prompt.
        tokens = {}
        for one in running:
            left = len(one._all_token_ids) - one.num_computed_tokens
            tokens[one.request_id] = min(left, MOST) if random.random() < 0.95 else 0
        tokens = {name: new for name, new in tokens.items() if new}
        for one in running:
            one.num_computed_tokens += tokens.get(one.request_id, 0)
        tracker.record_step(running, tokens, sum(tokens.values()))
        keys, blocks = (column.tolist() for column in tracker.rows(running))
        assert keys == [one.tandem.key for one in running]
        assert blocks == [-(-one.num_computed_tokens // BLOCK) for one in running]


def test_blocks_that_hold_only_some_layers_are_refused() -> None:
    full = SimpleNamespace(kv_cache_spec="a full context")
    require_one_group(SimpleNamespace(kv_cache_groups=[full]))
    with pytest.raises(ValueError, match=r"6 KV-cache groups .*disable_hybrid_kv_cache_manager: true"):
        require_one_group(SimpleNamespace(kv_cache_groups=["full", *["sliding"] * 5]))


def test_a_window_in_all_layers_is_refused() -> None:
    class SlidingWindowSpec:
        """Named as that of vLLM."""

    windowed = SimpleNamespace(kv_cache_spec=SlidingWindowSpec())
    with pytest.raises(ValueError, match="disable_sliding_window: true"):
        require_one_group(SimpleNamespace(kv_cache_groups=[windowed]))


# With a prompt of 10 and at most 3 tokens, the last token follows from position 12.
@pytest.mark.parametrize(
    ("computed", "in_flight", "ends"), [(10, 1, False), (11, 1, False), (12, 1, True), (12, 0, False)]
)
def test_a_request_ends_with_the_step_in_flight_that_produces_its_last_token(computed, in_flight, ends):
    request = SimpleNamespace(
        num_computed_tokens=computed, num_output_placeholders=in_flight, num_prompt_tokens=10, max_tokens=3
    )
    assert is_ending(request) is ends
