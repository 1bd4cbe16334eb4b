"""Every path of a request through the gate, on virtual time."""

import asyncio

import numpy as np
import pytest

from backends.testing.scripted import Script, ScriptedEmbedder, ScriptedGenerator
from controlplane.core.clock import to_seconds
from controlplane.core.decision import Reason
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.request import Owner
from controlplane.service.request_jobs import Caller, RequestOrigin, TruncationRequest
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read


def one_at_a_time(**options: float) -> ScriptedGenerator:
    return ScriptedGenerator(max_running=1, **{"prefill_seconds": 0.1, "token_seconds": 0.1, **options})


ALONE = {"admission": {"engine_queue": 0}}


def test_an_admitted_request_streams_and_ends_met(bench):
    async def scenario(b):
        answer = await b.ask(max_tokens=3, service_class="interactive")
        assert answer.ticket.decision == "ADMIT"
        assert b.service.gate.dispatcher.ledger.count(Owner.LLM) == 1
        assert await read(answer) == "word word word "

    b = bench(scenario)
    assert b.outcomes == ["met"]
    ticket = b.ended[0]
    assert to_seconds(ticket.timeline.ttft) == pytest.approx(0.1)
    assert to_seconds(ticket.timeline.tpot) == pytest.approx(0.05)


def test_a_finish_after_the_objective_is_late(bench):
    async def scenario(b):
        await read(await b.ask(ttft_ms=50, service_class="standard"))

    assert bench(scenario).outcomes == ["late"]


def test_a_deferred_request_starts_when_a_slot_is_free(bench):
    async def scenario(b):
        first = await b.ask(max_tokens=4)
        second = asyncio.create_task(b.ask(max_tokens=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 1
        await read(first)
        answer = await second
        assert answer.ticket.decision == "DEFER"
        assert answer.ticket.queue_ms == pytest.approx(400)
        await read(answer)

    assert bench(scenario, generator=one_at_a_time(), **ALONE).outcomes == ["met", "met"]


def test_an_unattainable_deadline_is_rejected_with_the_predicted_drain(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=30))
        running = await b.ask(max_tokens=100, service_class="interactive")
        await anext(running)
        with pytest.raises(Rejected) as caught:
            await b.ask(service_class="interactive")
        assert caught.value.reject.reason is Reason.SLO_UNATTAINABLE
        # 99 tokens of 100 ms remain; the predictor expects fewer, but far more than one second.
        assert 1.5 < to_seconds(caught.value.reject.retry_after) <= 12
        await running.aclose()

    b = bench(scenario, generator=one_at_a_time(), **ALONE)
    assert b.outcomes == ["met", "rejected", "aborted"]


def test_waiting_ends_at_max_wait(bench):
    async def scenario(b):
        running = await b.ask(max_tokens=100)
        start = asyncio.get_running_loop().time()
        reading = asyncio.create_task(read(running))
        with pytest.raises(Rejected) as caught:
            await b.ask()
        assert caught.value.reject.reason is Reason.QUEUE_TIMEOUT
        assert asyncio.get_running_loop().time() - start == pytest.approx(2.0)
        await reading

    sections = {"admission": {"engine_queue": 0, "max_wait_ms": 2000}}
    assert bench(scenario, generator=one_at_a_time(), **sections).outcomes == ["rejected", "met"]


def test_a_full_queue_rejects_a_new_request(bench):
    async def scenario(b):
        running = await b.ask(max_tokens=5)
        waiting = asyncio.create_task(b.ask())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as caught:
            await b.ask()
        assert caught.value.reject.reason is Reason.QUEUE_FULL
        await read(running)
        await read(await waiting)

    sections = {"admission": {"engine_queue": 0, "max_waiting": 1}}
    bench(scenario, generator=one_at_a_time(), **sections)


def test_a_client_that_leaves_while_waiting_leaves_the_queue(bench):
    async def scenario(b):
        running = await b.ask(max_tokens=5)
        waiting = asyncio.create_task(b.ask())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 0
        await read(running)

    assert bench(scenario, generator=one_at_a_time(), **ALONE).outcomes == ["aborted", "met"]


def test_a_client_that_leaves_mid_stream_aborts_the_engine(bench):
    async def scenario(b):
        answer = await b.ask(max_tokens=50)
        await anext(answer)
        await answer.aclose()
        await answer.aclose()
        assert len(b.generator.aborted) == 1

    assert bench(scenario).outcomes == ["aborted"]


def test_aclose_ends_a_stream_that_was_never_read(bench):
    async def scenario(b):
        await (await b.ask()).aclose()

    assert bench(scenario).outcomes == ["aborted"]


def test_cancelling_the_reader_aborts(bench):
    async def scenario(b):
        answer = await b.ask(max_tokens=50)
        reading = asyncio.create_task(read(answer))
        await b.generator.until_runs(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    assert bench(scenario).outcomes == ["aborted"]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(request_fails_after=2), BackendFailed),
        (Script(engine_fails_after=2), BackendDown),
        (Script(engine_fails_after=0), BackendDown),
    ],
)
def test_a_failing_engine_fails_the_request_and_frees_its_lease(bench, script, error):
    async def scenario(b):
        b.generator.upcoming.append(script)
        with pytest.raises(error):
            await read(await b.ask(max_tokens=8))
        assert len(b.ended) == 1

    assert bench(scenario).outcomes == ["failed"]


def test_a_request_larger_than_the_quota_is_rejected_with_its_size(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        whole = dispatcher.ledger.quota(Owner.LLM)
        dispatcher.ledger.set_quota(Owner.LLM, 64 * b.generator.geometry.bytes_per_token)
        with pytest.raises(Rejected) as caught:
            await b.ask("x" * 100)
        assert caught.value.reject.reason is Reason.NEVER_FITS
        assert caught.value.reject.retry_after is None
        assert "lower max_tokens" in caught.value.reject.detail
        dispatcher.ledger.set_quota(Owner.LLM, whole)

    assert bench(scenario).outcomes == ["rejected"]


def test_raising_a_quota_starts_waiting_requests(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        whole = dispatcher.ledger.quota(Owner.LLM)
        dispatcher.ledger.set_quota(Owner.LLM, 160 * b.generator.geometry.bytes_per_token)
        first = await b.ask("x" * 64, max_tokens=64)
        second = asyncio.create_task(b.ask("x" * 64, max_tokens=64))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(dispatcher.queued(Owner.LLM)) == 1
        dispatcher.ledger.set_quota(Owner.LLM, whole)
        dispatcher.decide()
        answer = await second
        assert answer.ticket.queue_ms == 0
        await asyncio.gather(read(first), read(answer))

    bench(scenario)


def test_memory_of_one_request_is_predicted_for_the_next(bench):
    """With max-tokens forecasts two requests of 128 tokens do not fit 160 tokens of blocks together."""

    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        dispatcher.ledger.set_quota(Owner.LLM, 160 * b.generator.geometry.bytes_per_token)
        first = await b.ask("x" * 32, max_tokens=96)
        second = asyncio.create_task(b.ask("x" * 32, max_tokens=96))
        reading = asyncio.create_task(read(first))
        await b.generator.until_runs(1)
        assert dispatcher.ledger.count(Owner.LLM) == 1
        await reading
        await read(await second)
        assert b.generator.runs[1].end == "finished"

    bench(scenario, admission={"length_predictor": "max-tokens"})


def test_a_late_high_priority_request_preempts_and_the_victim_resumes(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = await b.ask(max_tokens=60, service_class="batch")
        text = asyncio.create_task(read(victim))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        urgent = await b.ask(max_tokens=2, service_class="interactive")
        assert urgent.ticket.decision == "ADMIT_WITH_PREEMPTION"
        assert await read(urgent) == "word word "
        assert (await text).count("word") == 60
        resumed = b.generator.runs[-1]
        assert resumed.request.id == victim.ticket.request.id
        assert len(resumed.prompt) + resumed.sampling.max_tokens == len("hello") + 60

    b = bench(scenario, generator=one_at_a_time(), **ALONE)
    assert b.outcomes == ["met", "met", "met"]
    assert [ticket.preemptions for ticket in b.ended] == [0, 0, 1]


class SlowPreemption(ScriptedGenerator):
    """An engine that an order reaches after 50 ms."""

    async def preempt(self, request_id: str) -> None:
        await asyncio.sleep(0.05)
        await super().preempt(request_id)


def test_a_client_that_leaves_during_a_preemption_for_it_does_not_cancel_it(bench):
    """The victim's lease is closed already, so it must not keep the engine's memory."""

    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = await b.ask(max_tokens=60, service_class="batch")
        text = asyncio.create_task(read(victim))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        reading = asyncio.create_task(read(await b.ask(max_tokens=2, service_class="interactive")))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await text).count("word") == 60
        assert [run.is_preempted for run in b.generator.runs] == [False, True, False]

    engine = SlowPreemption(max_running=1, prefill_seconds=0.1, token_seconds=0.1)
    assert bench(scenario, generator=engine, **ALONE).outcomes == ["met", "aborted", "met"]


def test_equal_priority_is_never_preempted(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        running = await b.ask(max_tokens=60, service_class="interactive")
        reading = asyncio.create_task(read(running))
        await b.generator.until_runs(2)
        with pytest.raises(Rejected):
            await b.ask(service_class="interactive")
        await reading

    b = bench(scenario, generator=one_at_a_time(), **ALONE)
    assert b.ended[-1].preemptions == 0


def test_embeddings_are_leased_and_released(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        embedding = asyncio.create_task(b.embed("one", "two two"))
        await b.embedder.until_runs(1)
        assert dispatcher.ledger.held(Owner.EMBEDDING) == b.embedder.batch_bytes([3, 7]) // 2
        assert b.generator.is_sharing, "steps may wait for the end of the pass"
        embedded = await embedding
        assert embedded.vectors.shape == (2, 8)
        assert not b.generator.is_sharing
        assert embedded.ticket.decision == "ADMIT"

    assert bench(scenario).outcomes == ["met"]


def test_embeddings_beyond_the_workspace_wait(bench):
    async def scenario(b):
        dispatcher, texts = b.service.gate.dispatcher, ["x" * 500] * 8
        tasks = [asyncio.create_task(b.embed(*texts)) for _ in range(8)]
        await b.embedder.until_runs(4)
        assert dispatcher.ledger.count(Owner.EMBEDDING) == 4
        assert len(dispatcher.queued(Owner.EMBEDDING)) == 4
        done = await asyncio.gather(*tasks)
        assert [embedded.ticket.queue_ms for embedded in done] == pytest.approx([0] * 4 + [100] * 4)

    bench(scenario)


def test_embedding_passes_are_priced_by_the_objectives_of_running_generations(bench):
    async def scenario(b):
        assert b.embedder.pause_cost() is None
        answer = await b.ask(max_tokens=8, tpot_ms=80)
        assert b.embedder.pause_cost()(np.array([1.0])) == [0.0], "no objective before its first token"
        for _ in range(4):
            await anext(answer)
        cost = b.embedder.pause_cost()
        # The output is 90 ms ahead of a TPOT of 80 ms, and each token of 50 ms regains 30 ms.
        assert cost(np.array([0.1, 1.0])) == pytest.approx([0.0, 2.0]), "the weight of its class"
        async for _ in answer:
            pass
        assert b.embedder.pause_cost() is None

    bench(scenario)


def test_a_too_long_input_is_truncated_only_on_request(bench):
    async def scenario(b):
        intake, limit, text = b.service.intake, b.embedder.max_input_tokens, "x" * 2_000 + "!"
        origin = RequestOrigin("e", Caller("tests"))
        with pytest.raises(Refused, match=r"at most 512 tokens, .* 2,001 characters"):
            await intake.embeddings(origin, b.embedder.model, [text])
        job = await intake.embeddings(origin, b.embedder.model, [text], truncation=TruncationRequest())
        assert bytes(job.inputs[0]) == b"x" * limit
        assert job.request.prompt_tokens == limit
        with pytest.raises(Refused, match=r"input\[1\] has no tokens"):
            await intake.embeddings(origin, b.embedder.model, [[5], []])

    bench(scenario)


def test_a_tenant_over_its_rate_is_rejected_with_the_refill(bench):
    async def scenario(b):
        b.service.gate.dispatcher.pace_estimators.llm.observe_step(1)
        job = await b.service.intake.completion(
            RequestOrigin("r", Caller("web")), b.generator.model, "hi",
            max_tokens=1, sampling=(await b.job()).sampling,
        )  # fmt: skip
        await read(await b.service.gate.generate(job))
        with pytest.raises(Rejected) as caught:
            await b.service.gate.generate(job)
        assert caught.value.reject.reason is Reason.RATE_LIMITED
        assert to_seconds(caught.value.reject.retry_after) == pytest.approx(60 - 0.1, abs=0.05)

    tenants = {"web": {"api_keys_sha256": ["0" * 64], "requests_per_minute": 1}}
    bench(scenario, tenants=tenants)


def test_an_embedding_is_rejected_if_the_work_ahead_makes_it_late(bench):
    async def scenario(b):
        async def embed(inputs: int, e2e_ms: float):
            return await b.embed(*["x" * 100] * inputs, service_class="quick", e2e_ms=e2e_ms)

        # The time per token is known before the first pass, from the profiling at the start of the engine.
        first = asyncio.create_task(embed(8, 2_500))
        await b.embedder.until_runs(1)
        # 0.8 s of work are in flight. This call needs 2 s: either one would be late behind the other.
        for e2e_ms in (2_600, 2_400):
            with pytest.raises(Rejected) as refused:
                await embed(20, e2e_ms)
            assert refused.value.reject.reason == Reason.SLO_UNATTAINABLE
        await embed(8, 2_400)
        await first

    classes = {"quick": {"priority": 1, "e2e_ms": 60_000, "default": True}}
    embedder = ScriptedEmbedder(token_seconds=0.001, batch_tokens=100_000)
    assert bench(scenario, embedder=embedder, classes=classes).outcomes == [
        "rejected",
        "rejected",
        "met",
        "met",
    ]
