"""The live feed on virtual time, with scripted engines and on the simulated machine."""

import asyncio
import gc
import json
import tracemalloc
from collections import Counter

import pytest

from backends.testing.scripted import ScriptedGenerator
from benchmark_control_plane.simulator import simulation
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.commands.live_view import LiveView
from controlplane.config import ConfigError
from controlplane.core.errors import Refused
from controlplane.core.request import Kind, Owner, Request
from controlplane.service.live_records import RING_SIZES
from controlplane.service.ticket import Rejected
from tests.controlplane.service.memory.test_quota_controller import CLASSES, MACHINE, QUOTA, mixed
from tests.controlplane.service.scripted_bench import read


def records(service, kind: str | None = None, since: int = 0) -> list[dict]:
    """All records, read page by page."""
    found, more = [], True
    while more:
        answer = json.loads(service.live.since(since, "test"))
        found += answer["records"]
        since, more = answer["next"], answer["more"]
    return [one for one in found if kind in (None, one["type"])]


def test_a_request_leaves_its_decision_its_end_and_its_times(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=4, service_class="interactive"))
        await read(await b.ask(max_tokens=4, service_class="interactive"))
        b.service.live.sample()
        decided, ended = records(b.service, "admission"), records(b.service, "end")
        assert [(one["victims"], one["class"], one["kind"]) for one in decided] == [
            (0, "interactive", "generate")
        ] * 2
        assert [one["id"] for one in ended] == [one["id"] for one in decided]
        assert ended[1]["outcome"] == "met" and ended[1]["missed"] == []
        assert ended[1]["ttft_ms"] == pytest.approx(100, abs=1)
        (sample,) = records(b.service, "sample")
        quick = sample["classes"]["interactive"]
        assert quick["5m"] == quick["1h"] == {"met": 2, "ended": 2, "burn": 0.0}
        # The first request had no forecast, since no step had been observed.
        assert quick["first_tokens"] == 1 and quick["ttft_ms"] == pytest.approx(100, abs=1)
        b.service.live.sample()
        assert "first_tokens" not in records(b.service, "sample")[1]["classes"]["interactive"]

    bench(scenario)


def test_a_sample_shows_memory_by_owner_and_class(bench):
    async def scenario(b):
        reading = [
            asyncio.create_task(read(await b.ask(max_tokens=60, service_class=name)))
            for name in ("batch", "batch", "interactive")
        ]
        await asyncio.sleep(1)
        b.service.live.sample()
        (sample,) = records(b.service, "sample")
        llm, ledger = sample["owners"]["llm"], b.service.gate.dispatcher.ledger
        assert llm["held_bytes"] == sum(llm["held_by_class"].values()) == ledger.held(Owner.LLM) > 0
        assert llm["quota_bytes"] + sample["owners"]["embedding"]["quota_bytes"] == sample["pool_bytes"]
        assert llm["held_by_class"]["batch"] == 2 * llm["held_by_class"]["interactive"]
        assert {name: one["running"] for name, one in sample["classes"].items()} == {
            "interactive": 1, "standard": 0, "batch": 2,
        }  # fmt: skip
        assert sample["faults"] == {} and sample["config_version"] == 1
        await asyncio.gather(*reading)

    bench(scenario)


def test_work_that_ends_in_a_second_is_shown_in_as_many_seconds_as_it_took(bench):
    async def scenario(b):
        counted = b.service.status.metrics.device_time
        for llm, embedding in ((0.7, 0.0), (2.4, 0.6), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)):
            await asyncio.sleep(1)
            counted[Owner.LLM] += llm
            counted[Owner.EMBEDDING] += embedding
            b.service.live.sample()
        shares = [one["device"] for one in records(b.service, "sample")]
        assert [one["llm"] for one in shares] == pytest.approx([0.7, 0.8, 0.8, 0.8, 0], abs=2e-4)
        assert [one["embedding"] for one in shares] == pytest.approx([0, 0.2, 0.2, 0.2, 0], abs=2e-4)

    bench(scenario)


def test_a_preemption_names_beneficiary_and_cost(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        text = asyncio.create_task(read(await b.ask(max_tokens=60, service_class="batch")))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.05)
        await read(await b.ask(max_tokens=2, service_class="interactive"))
        await text
        (found,) = records(b.service, "preemption")
        victim, urgent = b.ended[2].request, b.ended[1].request
        assert (found["id"], found["class"], found["by"]) == (victim.id, "batch", "gate")
        assert (found["for"], found["for_class"]) == (urgent.id, "interactive")
        # Ten tokens at 0.1 s each had been generated.
        assert found["recompute_tokens"] == victim.prompt_tokens + 10
        assert found["recompute_ms"] > 0 and found["freed_bytes"] > 0

    bench(
        scenario,
        generator=ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=0.1),
        admission={"engine_queue": 0},
    )


def test_a_rejection_counts_as_a_miss(bench):
    async def scenario(b):
        reading = asyncio.create_task(read(await b.ask(max_tokens=60)))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(b.ask(max_tokens=60))
        await asyncio.sleep(0)
        with pytest.raises(Rejected):
            await b.ask(max_tokens=60)
        b.service.live.sample()
        assert [one["reason"] for one in records(b.service, "rejection")] == ["queue_full"]
        (ended,) = [one for one in records(b.service, "end") if one["outcome"] == "rejected"]
        assert ended["missed"] == [] and "ttft_ms" not in ended
        standard = records(b.service, "sample")[0]["classes"]["standard"]
        assert standard["5m"] == {"met": 0, "ended": 1, "burn": 10.0}
        assert standard["waiting"] == 1
        await reading
        await read(await waiting)

    bench(
        scenario,
        generator=ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=0.1),
        admission={"engine_queue": 0, "max_waiting": 1},
    )


def test_a_death_of_the_engine_and_its_restart_are_events(bench):
    async def scenario(b):
        b.generator.die("killed by the test")
        b.service.live.sample()
        (fault,) = records(b.service, "fault")
        assert (fault["part"], fault["state"]) == ("engine scripted", "began")
        assert "killed by the test" in fault["text"]
        await asyncio.sleep(5)
        b.service.live.sample()
        down, up = records(b.service, "restart")
        assert (down["part"], down["state"], down["model"]) == ("engine", "down", "scripted")
        assert "killed by the test" in down["text"]
        assert (up["part"], up["state"]) == ("engine", "up")
        assert [one["state"] for one in records(b.service, "fault")] == ["began", "ended"]
        assert records(b.service, "sample")[-1]["faults"] == {}

    bench(scenario)


def test_a_restarted_worker_and_a_fault_are_events(bench):
    async def scenario(b):
        b.embedder.restarts += 2
        b.service.gate.dispatcher.health.failed(Refused("no"))
        b.service.live.sample()
        b.service.gate.dispatcher.health.succeeded()
        b.service.live.sample()
        (restart,) = records(b.service, "restart")
        assert (restart["part"], restart["model"]) == ("worker", b.embedder.model)
        began, ended = records(b.service, "fault")
        assert began["text"] == ended["text"] == "requests fail without a decision: no"
        assert (began["state"], ended["state"]) == ("began", "ended")
        assert [list(one["faults"]) for one in records(b.service, "sample")] == [["decisions"], []]

    bench(scenario)


def test_a_worker_that_does_not_come_back_is_a_fault_and_no_restart(bench):
    """Each attempt counts as a restart, and the former event "worker up" said that it served again."""

    async def scenario(b):
        b.embedder.die("the worker died")
        for _ in range(3):
            b.embedder.restarts += 1
            b.service.live.sample()
        assert records(b.service, "restart") == []
        (began,) = records(b.service, "fault")
        assert (began["part"], began["text"]) == (f"worker {b.embedder.model}", "the worker died")
        await b.embedder.start()
        b.service.live.sample()
        assert [one["state"] for one in records(b.service, "restart")] == ["up"]
        assert [one["state"] for one in records(b.service, "fault")] == ["began", "ended"]

    bench(scenario)


def test_a_change_of_the_configuration_is_an_event(bench):
    async def scenario(b):
        await b.service.reconfiguration.change({"scheduling": {"ordering": "fcfs"}}, source="test")
        b.service.live.sample()
        first, second = records(b.service, "config")
        assert (first["version"], second["version"]) == (1, 2)
        assert second["changes"] == {"scheduling.ordering": ["least-slack", "fcfs"]}
        assert records(b.service, "sample")[0]["config_version"] == 2

    bench(scenario, scheduling={"ordering": "least-slack"})


def test_a_change_of_the_classes_reaches_readers_that_know_the_former_ones(bench):
    async def scenario(b):
        view, live = LiveView(), b.service.live
        assert not view.take(json.loads(live.since(0, "test")))
        classes = {"interactive": {"ttft_ms": 2_000}, "bulk": {"sheddable": False}}
        await b.service.reconfiguration.change({"classes": classes}, source="test")
        answer = json.loads(live.since(view.next, "test"))
        assert "about" not in answer and not view.take(answer)
        assert view.about == json.loads(live.since(0, "test"))["about"]
        assert view.about["classes"]["interactive"]["objectives_ms"] == {"ttft": 2_000.0}
        assert "bulk" in view.about["classes"]

    bench(scenario)


def test_a_failed_change_of_the_configuration_is_a_fault_until_the_next_one(bench):
    async def scenario(b):
        changing = b.service.reconfiguration
        with pytest.raises(ConfigError):
            await changing.change({"classes": {"interactive": {"ttft_ms": -1}}}, source="a test")
        b.service.live.sample()
        await changing.change({"scheduling": {"ordering": "fcfs"}}, source="a test")
        b.service.live.sample()
        began, ended = records(b.service, "fault")
        assert (began["part"], began["state"], ended["state"]) == ("configuration", "began", "ended")
        assert "the change by a test failed, and version 1 stays in force: " in began["text"]
        assert "ttft_ms" in began["text"]
        shown = [one["faults"] for one in records(b.service, "sample")]
        assert shown == [{"configuration": began["text"]}, {}]
        assert b.service.status.faults() == {}

    bench(scenario, scheduling={"ordering": "least-slack"})


def test_requests_that_are_rejected_unread_are_a_fault_for_a_minute(bench):
    async def scenario(b):
        for wait in (0, 40, 40, 30):
            await asyncio.sleep(wait)
            if wait == 40:
                b.service.status.count_shed(Kind.GENERATE)
            b.service.live.sample()
        shown = [list(one["faults"]) for one in records(b.service, "sample")]
        assert shown == [[], ["overload"], ["overload"], ["overload"]]
        await asyncio.sleep(31)
        b.service.live.sample()
        assert records(b.service, "sample")[-1]["faults"] == {}
        assert [one["state"] for one in records(b.service, "fault")] == ["began", "ended"]

    bench(scenario)


def test_a_drained_server_is_a_fault(bench):
    async def scenario(b):
        await b.service.drain()
        b.service.live.sample()
        (sample,) = records(b.service, "sample")
        assert sample["faults"].keys() == {"admission"}
        assert "the service was drained and accepts no requests" in sample["faults"]["admission"]

    bench(scenario)


def test_the_first_answer_describes_the_classes(bench):
    async def scenario(b):
        first, later = (json.loads(b.service.live.since(number, "one")) for number in (0, 1))
        about = first["about"]
        assert about["classes"]["interactive"] == {
            "priority": 5, "sheddable": True, "objectives_ms": {"ttft": 1000.0},
        }  # fmt: skip
        assert about["target"] == 0.9
        assert about["models"] == {"llm": [b.generator.model], "embedding": [b.embedder.model]}
        assert "about" not in later and later["instance"] == "one"

    bench(scenario)


def test_a_failed_sample_is_logged_and_the_next_one_is_taken(bench, caplog):
    async def scenario(b):
        status = b.service.status
        b.service.live.start()
        status.faults = lambda: 1 / 0
        await asyncio.sleep(2.5)
        assert records(b.service, "sample") == []
        del status.faults
        await asyncio.sleep(3)
        assert len(records(b.service, "sample")) == 3

    bench(scenario)
    assert caplog.text.count("the live feed has no new samples") == 1


@pytest.mark.long
def test_the_simulated_machine_is_sampled_in_virtual_time():
    offered, sections = sorted(mixed(), key=lambda one: one.at), {"classes": CLASSES, "quota": QUOTA}

    def length(request: Request) -> int:
        return offered[int(request.id.partition("-")[0])].output_tokens

    async def main() -> list[dict]:
        config = simulation.config_of(sections, has_pool=True)
        generator, embedder = simulation.engines(MACHINE, length, config)
        async with simulation.started(generator, embedder, MACHINE, config) as service:
            service.live.start()
            await simulation._all_clients(service, generator, offered)
            return records(service)

    found = run(main())
    samples = [one for one in found if one["type"] == "sample"]
    assert [one["at"] for one in samples] == [float(n) for n in range(1, len(samples) + 1)]
    assert max(one["device"]["llm"] for one in samples) > 0.5
    assert max(one["device"]["embedding"] for one in samples) > 0.005
    assert max(sum(one["device"].values()) for one in samples) <= 1
    moves = [one for one in found if one["type"] == "quota"]
    assert 0 < len(moves) <= len(samples)
    assert all(set(one["urgency"]) == set(one["from"]) == {"llm", "embedding"} for one in moves)
    assert max(one["moves"] for one in moves) > 1
    lent = [one["owners"][owner]["lent_bytes"] for one in samples for owner in ("llm", "embedding")]
    assert max(lent) > 0
    assert len([one for one in found if one["type"] == "end"]) == len(offered)


async def overload(b) -> None:
    """A request is preempted for another one, a third waits, and a fourth is rejected."""
    text = asyncio.create_task(read(await b.ask(max_tokens=8, service_class="batch")))
    await asyncio.sleep(2.05)
    urgent = asyncio.create_task(b.ask(max_tokens=1, service_class="interactive"))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(b.ask(max_tokens=1))
    await asyncio.sleep(0)
    with pytest.raises(Rejected):
        await b.ask(max_tokens=1)
    for asked in (urgent, waiting):
        await read(await asked)
    await text


@pytest.mark.slow
def test_memory_is_flat_over_a_day(bench):
    """What is held after a day is what was held after 18 hours, when every ring and window is full.

    The server is overloaded every two minutes. Samples are twenty seconds apart, since a day of seconds would
    take minutes under tracemalloc, and each is read.
    """
    held: list[int] = []
    view, seen = LiveView(), Counter[str]()

    def poll(b) -> None:
        b.service.live.sample()
        is_behind = True
        while is_behind:
            answer = json.loads(b.service.live.since(view.next, "test"))
            seen.update(record["type"] for record in answer["records"])
            is_behind = view.take(answer)

    async def scenario(b):
        await read(await b.ask(max_tokens=8))
        for _ in range(24):
            for second in range(0, 3_600, 20):
                await asyncio.sleep(20)
                if second % 120 == 0:
                    await overload(b)
                poll(b)
            # The bench and the scripted engine remember every request.
            b.ended.clear()
            b.generator.runs.clear()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        bench(
            scenario,
            server={"explain_requests": 50},
            generator=ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=1),
            admission={"length_predictor": "max-tokens", "engine_queue": 0, "max_waiting": 2},
        )
    finally:
        tracemalloc.stop()
    # Twice what a ring holds.
    for kind in ("sample", "preemption", "rejection", "deferral", "admission", "end"):
        assert seen[kind] >= 2 * RING_SIZES[kind], seen
    full = held[17]
    # An unbounded ring grows by more in an hour; a table of a library that is enlarged once does not.
    assert max(held[18:]) - full < 0.02 * full, held
