"""Requests with images at the gate: lease, shared prefixes and preemption."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.config.limits_section import LimitsSection
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, ImageLimits, ProcessedImages, RenderedImages, Sampling
from controlplane.core.request import Owner
from controlplane.service.gate.chat_rendering import ChatRendering
from controlplane.service.gate.token_stream import TokenStream
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from tests.controlplane.service.scripted_bench import read

IMAGE_TOKENS = 64


class OneImage:
    """Renders a conversation as one image, and `?` as its text; the digest is that of the data."""

    async def render(self, prompt: ChatPrompt, limits: ImageLimits) -> RenderedImages:
        (image,) = prompt.images
        found = ProcessedImages([(0, IMAGE_TOKENS, 2**32 + int(image.data))], image.data)
        return RenderedImages([7] * IMAGE_TOKENS + [63], found)


def seeing(**options) -> ScriptedGenerator:
    generator = ScriptedGenerator(prefill_seconds=0.1, token_seconds=0.1, **options)
    generator.images = OneImage()
    return generator


async def ask(b, image: int, *, max_tokens: int = 4, service_class: str = "batch") -> TokenStream:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    job = await b.service.intake.chat(
        RequestOrigin(f"image-{image}", Caller("tests"), RequestHints(service_class=service_class)),
        b.generator.model, ChatPrompt([{"role": "user", "content": [part]}]), max_tokens=max_tokens,
        sampling=Sampling(max_tokens=max_tokens),
    )  # fmt: skip
    return await b.service.gate.generate(job)


def test_new_limits_hold_for_the_next_request(bench):
    async def scenario(b):
        chats = ChatRendering(LimitsSection())
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,1"}}
        prompt = ChatPrompt([{"role": "user", "content": [part, part]}])
        assert [image.data for image in chats.opened(b.generator, prompt).images] == ["1", "1"]
        chats.set_limits(LimitsSection(max_images=1))
        with pytest.raises(Refused, match=r"part 1 is one image more than server\.limits\.max_images, 1"):
            chats.opened(b.generator, prompt)

    bench(scenario, generator=seeing())


def test_the_tokens_of_an_image_are_in_the_lease(bench):
    async def scenario(b):
        text = await b.ask("?", max_tokens=4)
        alone = b.service.gate.dispatcher.ledger.held(Owner.LLM)
        image = await ask(b, 1)
        assert image.ticket.request.prompt_tokens == IMAGE_TOKENS + 1
        blocks = IMAGE_TOKENS // b.generator.geometry.block_tokens
        added = b.service.gate.dispatcher.ledger.held(Owner.LLM) - 2 * alone
        assert added == blocks * b.generator.geometry.bytes_per_block
        await text.aclose()
        await image.aclose()

    bench(scenario, generator=seeing(), scheduling={"engine": "off"})


def test_only_equal_images_share_blocks(bench):
    async def scenario(b):
        first = await ask(b, 1)
        other, equal = await ask(b, 2), await ask(b, 1)
        assert other.ticket.request.cached_tokens == 0
        assert equal.ticket.request.cached_tokens == IMAGE_TOKENS
        for answer in (first, other, equal):
            await answer.aclose()

    bench(scenario, generator=seeing(has_prefix_cache=True), scheduling={"engine": "off"})


def test_a_preempted_request_resumes_with_its_image(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = await ask(b, 5, max_tokens=60)
        text = asyncio.create_task(read(victim))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        await read(await b.ask(max_tokens=2, service_class="interactive"))
        assert (await text).count("word") == 60
        first, resumed = [run for run in b.generator.runs if run.request.id == victim.ticket.request.id]
        assert resumed.chat.processed is first.chat.processed
        assert resumed.chat.processed.content == "5"
        assert resumed.prompt[: len(first.prompt)] == first.prompt
        assert len(resumed.prompt) > len(first.prompt)

    b = bench(scenario, generator=seeing(max_running=1), admission={"engine_queue": 0})
    assert [ticket.preemptions for ticket in b.ended] == [0, 0, 1]
