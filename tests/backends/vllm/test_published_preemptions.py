"""What vLLM's real scheduler with Tandem's policies publishes of its preemptions, without a model."""

import pytest

from backends.vllm.plugin.preemption_log import unpacked
from backends.vllm.plugin.shared_state import SharedState, key_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request):
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    return SteppedEngine(
        SteppedEngineSetup(
            blocks=64, block_tokens=16, max_model_tokens=1_024, max_running=16, max_step_tokens=256,
            batch_time="opt-13b-a100-80g", is_async=request.param,
        )
    )  # fmt: skip


def test_a_preemption_names_the_request_that_starts_in_its_place(engine, tmp_path):
    scheduler = engine.restart(tandem={"ordering": "srmt"})
    scheduler._shared_state = SharedState.create(tmp_path / "state")
    for number in range(4):
        engine.add(f"large{number}", 200, 700, extra={"tandem": {"id": f"large{number}", "tokens": 700}})
    while len(scheduler.running) < 4 or scheduler.running[-1].num_computed_tokens < 200:
        engine.step()
    tandem = {"id": "urgent", "tokens": 10, "ttft_ms": 100, "weight": 3}
    engine.add("urgent", 240, 10, extra={"tandem": tandem})
    for _ in range(100):
        if scheduler.preemptions.count:
            break
        engine.step()
    reading = scheduler._shared_state.read()
    first = next(unpacked(reading.preempted))
    assert reading.facts.preemptions == len(list(unpacked(reading.preempted))) >= 1
    assert first.victim in {key_of(f"large{number}") for number in range(4)}
    assert (first.beneficiary, first.at_ns <= engine.now_ns) == (key_of("urgent"), True)
    assert first.tokens >= 200
    assert "urgent" in {request.request_id for request in scheduler.running}


def test_growth_preempts_for_no_request_in_particular(engine, tmp_path):
    scheduler = engine.restart(tandem={"ordering": "fcfs"})
    scheduler._shared_state = SharedState.create(tmp_path / "state")
    for number in range(8):
        # They fit when they start, and not when they have grown.
        engine.add(f"r{number}", 100, 300, extra={"tandem": {"id": f"r{number}", "tokens": 1}})
    while not scheduler.preemptions.count:
        engine.step()
    rows = list(unpacked(scheduler._shared_state.read().preempted))
    assert rows and {row.beneficiary for row in rows} == {0}
