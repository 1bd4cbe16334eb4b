"""The decode load that a snapshot states for the running generations."""

import asyncio
from itertools import count

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep
from controlplane.core.request import Owner
from controlplane.service.gate.snapshot import decode_load


def test_decode_load_holds_the_remaining_tpot_budgets(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        begun = await b.ask("hello", max_tokens=8, tpot_ms=80)
        for _ in range(3):
            await anext(begun)
        unread = await b.ask("a prompt", max_tokens=8, service_class="batch")
        now, paces = b.service.gate.clock.now(), dispatcher.pace_estimators.llm
        share = dispatcher.snapshots.share(Owner.LLM, 0, now)
        assert share.decode_load is None, "no step was reported"
        for _ in range(16):
            b.generator.on_step(EngineStep(0, 1, 8, milliseconds(10)))
        tempo = decode_load(dispatcher.tickets(), share.leases, share.ceiling - share.held, paces, now)
        assert (tempo.sequences, tempo.cells, tempo.prompt_tokens_pending) == (2, 5 + 3 + 8, 8)
        _, to_go = dispatcher.ledger.lease_state(begun.ticket.lease)
        assert tempo.tokens.tolist() == [to_go]
        slack = begun.ticket.slack(now, to_go, paces.pace)
        assert tempo.time_left.tolist() == [slack + milliseconds(80) * (to_go - 1)]
        assert tempo.tightest == milliseconds(80)
        for answer in (begun, unread):
            await answer.aclose()

    bench(scenario)


def test_a_request_without_its_first_token_counts_as_when_it_was_admitted(bench):
    async def scenario(b):
        snapshots, now = b.service.gate.dispatcher.snapshots, b.service.gate.clock.now()
        for _ in range(16):
            b.generator.on_step(EngineStep(0, 1, 8, milliseconds(10)))
        idle = snapshots.share(Owner.LLM, 0, now).decode_load
        unread = await b.ask("a prompt", max_tokens=8, tpot_ms=80)
        found = snapshots.share(Owner.LLM, 0, now).decode_load
        planned = idle.with_request(unread.ticket.request, unread.ticket.footprint)
        assert found.tokens.tolist() == planned.tokens.tolist() != []
        assert found.time_left.tolist() == planned.time_left.tolist()
        await unread.aclose()

    bench(scenario)


class TickingClock:
    """A clock that advances by 1 ns with each reading, as the host's does."""

    def __init__(self, clock):
        self._clock, self._ticks = clock, count()

    def now(self):
        return self._clock.now() + next(self._ticks)


@pytest.mark.parametrize("is_ticking", [False, True])
def test_a_prompt_that_the_engine_does_not_start_is_no_backlog(bench, is_ticking):
    """The engine has one slot, so it plans steps without the second request."""

    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        if is_ticking:
            dispatcher._clock = TickingClock(dispatcher._clock)
        running = await b.ask("hello", max_tokens=8)
        for _ in range(16):
            b.generator.on_step(EngineStep(0, 1, 8, milliseconds(10)))
        await anext(running)
        waiting = await b.ask("a prompt", max_tokens=8, service_class="batch")
        found = []
        for _ in range(5):
            dispatcher.sync_engine_leases()
            share = dispatcher.snapshots.share(Owner.LLM, 0, b.service.gate.clock.now())
            load = share.decode_load
            found.append((load.sequences, load.prompt_tokens_pending))
            # Its bytes are needed, whether or not the next step has it.
            needed = share.ceiling - share.held - load.unclaimed_bytes
            assert needed == waiting.ticket.footprint.base > 0
            await anext(running)
        # It counts until the engine has planned a step with it.
        assert (found[0], found[-1]) == ((2, 8), (1, 0))
        for answer in (running, waiting):
            await answer.aclose()

    engine = ScriptedGenerator(has_tandem_scheduler=True, max_running=1, token_seconds=0.1)
    bench(scenario, generator=engine, scheduling={"engine": {"ordering": "srmt"}})


def test_a_burst_onto_an_idle_engine_counts_from_the_first_request_on(bench):
    """An idle engine reports a new state on each call and has planned no step."""

    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        for _ in range(16):
            b.generator.on_step(EngineStep(0, 1, 8, milliseconds(10)))
        answers, found = [], []
        for _ in range(6):
            await asyncio.sleep(0.001)
            dispatcher.sync_engine_leases()
            load = dispatcher.snapshots.share(Owner.LLM, 0, b.service.gate.clock.now()).decode_load
            found.append((load.sequences, load.prompt_tokens_pending))
            answers.append(await b.ask("a prompt", max_tokens=8))
        assert found == [(n, 8 * n) for n in range(6)]
        for answer in answers:
            await answer.aclose()

    bench(scenario, generator=ScriptedGenerator(has_tandem_scheduler=True), scheduling={"engine": {}})
