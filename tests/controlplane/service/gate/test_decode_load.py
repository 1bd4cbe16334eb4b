"""The decode load that a snapshot states for the running generations."""

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
        now, paces = dispatcher._clock.now(), dispatcher.paces[Owner.LLM]
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
