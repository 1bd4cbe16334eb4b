"""What a client sees of a request that was preempted and resumed."""

import asyncio

from backends.testing.scripted import Script
from tests.controlplane.service.gate.test_dispatcher import ALONE, one_at_a_time
from tests.controlplane.service.scripted_bench import read


def test_a_resumed_request_states_the_cached_tokens_of_its_own_prompt_only(bench):
    async def scenario(b):
        b.generator.default = Script(cached_tokens=3)
        await read(await b.ask(max_tokens=60))
        victim = await b.ask(max_tokens=60, service_class="batch")

        async def cached() -> list[int]:
            return [delta.cached_tokens async for delta in victim]

        found = asyncio.create_task(cached())
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        await read(await b.ask(max_tokens=2, service_class="interactive"))
        assert sum(await found) == 3
        assert len(b.generator.runs[-1].prompt) > len("hello")

    b = bench(scenario, generator=one_at_a_time(), **ALONE)
    assert [ticket.preemptions for ticket in b.ended] == [0, 0, 1]
