"""The forecast in a load report against the simulated engine that it describes."""

import asyncio

import pytest

from backends.cost_models.step_time import affine, llm_only
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import Machine, engines
from benchmark_control_plane.simulator.simulation import config_of, started
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import to_seconds
from controlplane.core.generation import Sampling
from controlplane.core.request import Request
from controlplane.fleet.prefix_digest import PrefixDigest
from controlplane.service.request_jobs import Caller, RequestHints
from controlplane.service.service import Service

CALLER = Caller("team")
STEP, PER_TOKEN = 0.02, 1e-4
MACHINE = Machine(llm_only(affine(STEP, PER_TOKEN, 1e-4, 0.0)))

# In order of arrival, so that all that was sent before precedes the measured request.
SECTIONS = {
    "classes": {"chat": {"ttft_ms": 60_000, "default": True}},
    "scheduling": {"ordering": "fcfs", "priority_head_start_ms": 0},
}


async def _ask(service: Service, number: int, prompt_tokens: int, output_tokens: int) -> float | None:
    job = await service.intake.completion(
        f"{number}",
        CALLER,
        "simulated",
        prompt_ids(number, prompt_tokens, group=0, shared=0),
        max_tokens=output_tokens,
        sampling=Sampling(max_tokens=output_tokens),
        hints=RequestHints(),
    )
    stream = await service.gate.generate(job)
    async for _ in stream:
        pass
    ttft = stream.ticket.timeline.ttft
    return None if ttft is None else to_seconds(ttft)


async def _predicted_and_measured(queued: int) -> tuple[float, float]:
    def length(request: Request) -> int:
        return request.max_output_tokens

    config = config_of(SECTIONS, has_pool=False)
    generator, embedder = engines(MACHINE, length, config)
    async with started(generator, embedder, MACHINE, config) as service:
        for number in range(30):
            await _ask(service, number, 300, 20)
        others = [asyncio.create_task(_ask(service, 100 + at, 1_500, 60)) for at in range(queued)]
        await asyncio.sleep(0.001)
        report = service.load_reporter.report()
        ttft = await _ask(service, 999, 1_000, 2)
        await asyncio.gather(*others)
        assert ttft is not None
        predicted = report.intercept("simulated", "chat") + 1_000 * report.models["simulated"].per_token
        return predicted, ttft


@pytest.mark.parametrize("queued", [0, 8, 40])
def test_the_linear_forecast_predicts_the_time_to_first_token(queued: int) -> None:
    predicted, measured = run(_predicted_and_measured(queued))
    assert predicted == pytest.approx(measured, rel=0.35)


def test_the_default_class_is_the_first() -> None:
    """A router that is told no class takes its forecast, and not that of a class with hours of work ahead."""

    async def intercepts() -> list[str]:
        objective = {"ttft_ms": 60_000}
        classes = {"batch": objective, "chat": {**objective, "default": True}, "other": objective}
        config = config_of({"classes": classes}, has_pool=False)
        generator, embedder = engines(MACHINE, lambda request: 2, config)
        async with started(generator, embedder, MACHINE, config) as service:
            return list(service.load_reporter.report().owners["llm"].intercepts)

    assert run(intercepts()) == ["chat", "batch", "other"]


def test_a_router_finds_the_prefix_that_a_box_has() -> None:
    async def digests() -> tuple[dict[str, PrefixDigest], tuple[int, ...]]:
        config = config_of({}, has_pool=False)
        generator, embedder = engines(MACHINE, lambda request: 2, config)
        async with started(generator, embedder, MACHINE, config) as service:
            await _ask(service, 1, 320, 2)
            prefixes = service.gate.dispatcher.prefixes
            index = prefixes._indexes["simulated"]
            return prefixes.digests(), index.hashes(prompt_ids(1, 320, group=0, shared=0))

    found, blocks = run(digests())
    assert found["simulated"].cached_tokens(blocks) == 304


def test_each_choice_of_a_request_takes_a_place() -> None:
    async def utilisation() -> float:
        config = config_of(SECTIONS, has_pool=False)
        generator, embedder = engines(MACHINE, lambda request: 20, config)
        async with started(generator, embedder, MACHINE, config) as service:
            choices = generator.max_running // 8
            sampling = Sampling(max_tokens=20, n=choices)
            for number in range(7):
                job = await service.intake.completion(
                    f"{number}", CALLER, "simulated", prompt_ids(number, 30, group=0, shared=0),
                    max_tokens=20, sampling=sampling, hints=RequestHints(),
                )  # fmt: skip
                await (await service.gate.generate(job)).__anext__()
            return service.load_reporter.report().utilisation

    assert run(utilisation()) == pytest.approx(7 / 8)
