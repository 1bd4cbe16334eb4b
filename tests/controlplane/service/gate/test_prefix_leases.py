"""Requests that share a prefix: footprints, leases and rejections at the gate."""

import asyncio
from dataclasses import replace

import pytest

from backends.testing.scripted import Script, ScriptedGenerator
from controlplane.core.decision import Admit, Defer
from controlplane.core.request import Owner
from controlplane.service.gate.prefix_leases import PrefixLeases
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read
from tests.controlplane.service.test_live_feed import records

BLOCK = 16 * 1_024
PREFIX = "p" * 160


def caching(**options) -> ScriptedGenerator:
    return ScriptedGenerator(
        has_prefix_cache=True,
        prefill_seconds=0.1,
        token_seconds=0.1,
        default=Script(cached_tokens=160),
        **options,
    )


CONFIG = {"scheduling": {"engine": "off"}, "admission": {"length_predictor": "max-tokens"}}
ALONE = {"admission": {"length_predictor": "max-tokens", "engine_queue": 0}}


def test_a_shared_prefix_is_leased_once_and_passes_to_the_next_reader(bench):
    async def scenario(b):
        ledger = b.service.gate.dispatcher.ledger
        first = await b.ask(PREFIX + "first", max_tokens=4)
        alone = ledger.held(Owner.LLM)
        second = await b.ask(PREFIX + "other", max_tokens=4)
        assert second.ticket.request.cached_tokens == 160
        assert ledger.held(Owner.LLM) - alone == alone - 10 * BLOCK
        both = ledger.held(Owner.LLM)
        await first.aclose()
        ledger.check_integrity()
        assert ledger.held(Owner.LLM) == both - (alone - 10 * BLOCK) == alone
        await read(second)
        assert ledger.held(Owner.LLM) == 0
        # Cached, but no longer in use: it costs no time, and takes its memory again.
        third = await b.ask(PREFIX + "third", max_tokens=4)
        assert (third.ticket.request.prefill_tokens, ledger.held(Owner.LLM)) == (5, alone)
        await third.aclose()

    b = bench(scenario, generator=caching(), **CONFIG)
    assert sorted(b.outcomes) == ["aborted", "aborted", "met"]


def test_log_probabilities_of_a_prompt_are_computed_without_its_cached_prefix(bench):
    async def scenario(b):
        first = await b.ask(PREFIX + "first", max_tokens=4)
        job = await b.job(PREFIX + "other", max_tokens=4)
        job = replace(job, sampling=replace(job.sampling, prompt_logprobs=0))
        second = await b.service.gate.generate(job)
        assert second.ticket.request.cached_tokens == second.ticket.shared_bytes == 0
        await asyncio.gather(read(first), read(second))

    bench(scenario, generator=caching(), **CONFIG)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_only_without_a_prefix_cache_requests_with_a_common_prefix_are_rejected(bench, has_prefix_cache):
    rejected = 0

    async def scenario(b):
        nonlocal rejected

        async def one(number):
            nonlocal rejected
            try:
                await read(await b.ask(PREFIX + f"{number:04}", max_tokens=8, service_class="interactive"))
            except Rejected:
                rejected += 1

        await asyncio.gather(*(one(number) for number in range(40)))

    # Ten blocks of prefix and at most two of its own for each request; without sharing 480 are needed.
    generator = caching(kv_bytes=96 * BLOCK)
    generator.has_prefix_cache = has_prefix_cache
    bench(scenario, generator=generator, **CONFIG)
    assert (rejected == 0) == has_prefix_cache


def test_a_reported_miss_clears_what_no_request_uses(bench):
    async def scenario(b):
        await read(await b.ask(PREFIX, max_tokens=1))
        other = await b.ask("q" * 160, max_tokens=1)
        b.generator.default = Script(cached_tokens=0)
        again = await b.ask(PREFIX, max_tokens=1)
        assert again.ticket.request.cached_tokens == 144
        await read(other)
        await read(again)
        find = b.service.gate.dispatcher.prefixes.renew
        last = await b.ask("q" * 160, max_tokens=1)
        assert not find(last.ticket)
        await read(last)

    bench(scenario, generator=caching(), **CONFIG)


def test_a_victim_frees_and_recomputes_only_what_no_other_request_uses(bench):
    async def scenario(b):
        answers = [await b.ask(PREFIX + name, max_tokens=8) for name in ("first", "other")]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0.25)
        dispatcher = b.service.gate.dispatcher
        now = dispatcher._clock.now()
        first, second = dispatcher.snapshots.preemptible(now)
        held = [dispatcher.ledger.lease_state(answer.ticket.lease)[0] for answer in answers]
        assert held[0] - held[1] == 10 * BLOCK
        assert first.freed_bytes == second.freed_bytes == held[1]
        assert first.recompute == second.recompute
        await asyncio.gather(*reading)

    bench(scenario, generator=caching(), **CONFIG)


def test_a_request_that_is_decided_again_has_only_the_admission_that_held(bench):
    """Its prefix is not in use any more when it is its turn, so it needs more than it was decided on."""

    async def scenario(b):
        first = await b.ask(PREFIX + "first", max_tokens=2)
        waiting = asyncio.create_task(b.ask(PREFIX + "other", max_tokens=2))
        await asyncio.sleep(0)
        shared = b.service.gate.tickets()[-1].shared_bytes
        await read(first)
        second = await waiting
        assert (shared, second.ticket.shared_bytes) == (10 * BLOCK, 0)
        assert [type(event.decision) for event in second.ticket.history] == [Defer, Admit]
        assert second.ticket.history[-1].basis.entry.footprint == second.ticket.footprint
        admitted = [one["id"] for one in records(b.service, "admission")]
        assert admitted == [first.ticket.request.id, second.ticket.request.id]
        await read(second)

    bench(scenario, generator=caching(max_running=1), **CONFIG | ALONE)


def test_each_model_has_a_digest_of_its_own_prefixes():
    models = {name: ScriptedGenerator(model=name, has_prefix_cache=True) for name in ("large", "small")}
    models["without"] = ScriptedGenerator(model="without", has_prefix_cache=False)
    prefixes = PrefixLeases(models, None, follows_engine=False)
    blocks = prefixes._indexes["small"].hashes(range(321))
    prefixes._indexes["small"].admit("request", blocks)
    found = {name: digest.cached_tokens(blocks) for name, digest in prefixes.digests().items()}
    assert found == {"large": 0, "small": 320}
