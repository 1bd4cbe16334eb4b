"""Who runs, kept by column from step to step: always what reading everything anew would say."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vllm.plugin.batch_view import BatchTracker
from backends.vllm.plugin.request_metadata import Defaults, make_engine_request
from controlplane.core.clock import Instant
from controlplane.core.forecast import LengthForecast

BLOCK = 16
MOST = 64


def arrived(number: int, prompt: int) -> SimpleNamespace:
    """What is read of one of vLLM's requests."""
    facts = {"request_id": f"r{number}", "prompt_tokens": prompt, "max_tokens": 100, "now": Instant(number)}
    return SimpleNamespace(
        request_id=f"r{number}",
        tandem=make_engine_request({}, Defaults(), **facts),
        _all_token_ids=[0] * prompt,
        num_computed_tokens=0,
        num_output_placeholders=0,
        spec_token_ids=[],
    )


def grown(running: list[SimpleNamespace]) -> int:
    asked = 0
    for one in running:
        done = one.num_computed_tokens
        known = len(one._all_token_ids) + one.num_output_placeholders
        asked += max(0, -(-min(known, done + MOST) // BLOCK) + (-done // BLOCK))
    return asked


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("takes_back", [False, True])
@given(random=st.randoms(use_true_random=True), is_told=st.booleans())
def test_what_is_kept_is_what_is_there(random, runs_ahead, takes_back, is_told):
    runners = BatchTracker(BLOCK, has_packed=False, runs_ahead=runs_ahead, takes_back=takes_back)
    running: list[SimpleNamespace] = []
    for number in range(30):
        now = Instant(1_000 + number)
        if runs_ahead:
            for one in running:
                one.num_output_placeholders = random.randrange(2)
        # Without drafts and transfers a step may still be in flight where a pipeline has several.
        is_in_flight = random.random() < 0.2
        for one in running:
            if one.num_computed_tokens == len(one._all_token_ids) and not is_in_flight:
                one._all_token_ids.append(0)
            elif takes_back and random.random() < 0.1:
                one.num_computed_tokens -= random.randrange(one.num_computed_tokens + 1)
        runners.stamp(running, now, is_in_flight=is_in_flight)
        assert runners.growth(MOST) == grown(running)
        assert list(runners.batch) == [one.tandem for one in running]
        assert all(one.tandem.tokens == len(one._all_token_ids) for one in running)
        if running and random.random() < 0.2:
            told = random.choice(running).tandem
            told.set_forecast(LengthForecast((0.0, 1.0), (10.0, random.choice([20.0, 200.0]))))
            runners.set_forecast(told)
        assert runners.batch.to_come().tolist() == [one.tandem.remaining() for one in running]
        assert all(one.tandem.held == -(-one.num_computed_tokens // BLOCK) for one in running)
        for one in random.sample(running, random.randrange(len(running) + 1) // 3):
            running.remove(one)
            if is_told:
                runners.remove(one.tandem)
        running += [
            arrived(100 * number + more, random.randint(1, 150)) for more in range(random.randrange(3))
        ]
        # Most steps compute one token of everybody, some pass over somebody or cut a prompt.
        tokens = {}
        for one in running:
            left = len(one._all_token_ids) - one.num_computed_tokens
            tokens[one.request_id] = min(left, MOST) if random.random() < 0.95 else 0
        tokens = {name: new for name, new in tokens.items() if new}
        for one in running:
            one.num_computed_tokens += tokens.get(one.request_id, 0)
        runners.record_step(running, tokens, sum(tokens.values()))
        keys, stamped, blocks = (column.tolist() for column in runners.rows(running))
        assert keys == [one.tandem.key for one in running]
        assert stamped == [one.tandem.tokens for one in running]
        assert blocks == [-(-one.num_computed_tokens // BLOCK) for one in running]
