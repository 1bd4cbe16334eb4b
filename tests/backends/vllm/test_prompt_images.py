"""Images in prompts on a real engine: their tokens, their effect on the answer, and preemption."""

import base64
from dataclasses import replace
from io import BytesIO

import pytest
import pytest_asyncio
from PIL import Image

from backends.vllm.client import VllmGenerator
from controlplane.config.limits_section import LimitsSection
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, Delta, Handoff, Sampling
from controlplane.policy.engine.options import EngineOptions
from controlplane.service.gate.chat_rendering import ChatRendering
from tests.engines import a_request, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]

GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
QUESTION = {"type": "text", "text": "What is this?"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine():
    async with running_vllm("tandem/tiny-idefics", scheduling=EngineOptions()) as generator:
        yield generator


def part(color: str, size: tuple[int, int] = (50, 40)) -> dict:
    file = BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*content: dict) -> list[dict]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(content)}]


async def rendered(engine: VllmGenerator, messages: list[dict]) -> tuple[list[int], ChatPrompt]:
    chats = ChatRendering(LimitsSection())
    token_ids, prompt = await chats.render(engine, chats.opened(engine, ChatPrompt(messages)))
    return list(token_ids), prompt


async def answer(engine: VllmGenerator, messages: list[dict], sampling: Sampling = GREEDY) -> list[Delta]:
    prompt, chat = await rendered(engine, messages)
    return [one async for one in engine.generate(a_request(prompt, sampling), prompt, sampling, chat)]


async def counted_by_vllm(engine: VllmGenerator, messages: list[dict]) -> list[int]:
    """The token ids that vLLM's own server makes of the conversation."""
    from vllm.renderers.params import ChatParams

    options = {"add_generation_prompt": True, "tokenize": False}
    renderer = engine._engine._llm.renderer
    _, (found,) = await renderer.render_chat_async(
        [messages], ChatParams(chat_template_kwargs=options), renderer.default_cmpl_tok_params
    )
    return found["prompt_token_ids"]


@pytest.mark.parametrize(
    "content",
    [
        (QUESTION,),
        (part("red"), QUESTION),
        (QUESTION, part("red", (300, 20)), {"type": "text", "text": "and this?"}, part("blue", (8, 8))),
    ],
    ids=["text", "one image", "two images of other sizes"],
)
async def test_the_tokens_are_those_of_vllms_own_server(engine: VllmGenerator, content: tuple[dict, ...]):
    prompt, chat = await rendered(engine, asked(*content))
    own = await counted_by_vllm(engine, asked(*content))
    # Tandem's chats have no second token for the beginning, which the template writes.
    assert prompt == own[len(own) - len(prompt) :]
    assert set(own[: len(own) - len(prompt)]) <= {engine._engine.tokenizer.bos_token_id}
    assert chat.images == ()
    images = sum(one["type"] == "image_url" for one in content)
    assert (0 if chat.processed is None else len(chat.processed.spans)) == images


async def test_an_image_changes_the_answer_and_equal_images_do_not(engine: VllmGenerator):
    red, again, blue = [
        await answer(engine, asked(part(color), QUESTION)) for color in ("red", "red", "blue")
    ]
    both = await answer(engine, asked(part("red"), part("blue"), QUESTION))
    assert tokens_of(red) == tokens_of(again)
    assert len({(red[0].logprobs[0].logprob), blue[0].logprobs[0].logprob, both[0].logprobs[0].logprob}) == 3


async def test_prompts_that_differ_in_an_image_only_share_no_blocks(engine: VllmGenerator):
    (red, one), (blue, other) = [await rendered(engine, asked(part(c), QUESTION)) for c in ("red", "blue")]
    assert red == blue
    assert one.processed.marked(red) != other.processed.marked(blue)
    assert len(one.processed.marked(red)) == len(red)


async def test_a_preempted_request_with_an_image_resumes(engine: VllmGenerator):
    prompt, chat = await rendered(engine, asked(part("red"), QUESTION))
    sampling = replace(GREEDY, max_tokens=96, logprobs=None)
    whole = [one async for one in engine.generate(a_request(prompt, sampling), prompt, sampling, chat)]
    request, seen = a_request(prompt, sampling), []
    async for delta in engine.generate(request, prompt, sampling, chat):
        seen.append(delta)
        if len(tokens_of(seen)) >= 8:
            await engine.preempt(request.id)
    cut = tokens_of(seen)
    assert seen[-1].finish_reason == "preempted"
    rest = replace(sampling, max_tokens=96 - len(cut))
    resumed = [*prompt, *cut]
    handoff = Handoff(resumed_tokens=len(cut))
    after = engine.generate(a_request(resumed, rest), resumed, rest, chat, handoff=handoff)
    assert cut + tokens_of([delta async for delta in after]) == tokens_of(whole)


async def test_a_broken_image_is_refused(engine: VllmGenerator):
    url = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    with pytest.raises(Refused, match=r"messages\[1\].content: part 0: the image is no PNG"):
        await rendered(engine, asked({"type": "image_url", "image_url": {"url": url}}))


async def test_a_model_without_an_image_encoder_takes_none(tiny_vllm: VllmGenerator):
    assert tiny_vllm.images is None
    with pytest.raises(Refused, match="part 0 is an image; only text is passed on to"):
        await rendered(tiny_vllm, asked(part("red")))
