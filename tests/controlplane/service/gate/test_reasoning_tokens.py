"""Reasoning tokens are part of the output, also across a preemption."""

import asyncio

from backends.testing.scripted import Script
from tests.controlplane.service.gate.test_dispatcher import ALONE, one_at_a_time
from tests.controlplane.service.scripted_bench import read


def test_reasoning_sent_before_a_preemption_is_not_sent_again(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        b.generator.upcoming.append(Script(reasoning_words=("hm ",) * 60))
        victim = await b.ask(max_tokens=60, service_class="batch")
        reading = asyncio.create_task(_reasoning_and_text(victim))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        await read(await b.ask(max_tokens=2, service_class="interactive"))
        reasoning, text = await reading
        before = len(b.generator.runs[-1].prompt) - len("hello")
        assert before > 0
        assert (reasoning.count("hm"), text.count("word")) == (before, 60 - before)

    b = bench(scenario, generator=one_at_a_time(), **ALONE)
    assert [ticket.preemptions for ticket in b.ended] == [0, 0, 1]


async def _reasoning_and_text(answer):
    deltas = [delta async for delta in answer]
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)
