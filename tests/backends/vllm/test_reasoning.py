"""A reasoning model in a real engine: reasoning, content, and when a grammar applies."""

import json
import shutil

import pytest
import pytest_asyncio

from backends import bundled_models
from controlplane.core.errors import BackendDown
from controlplane.core.generation import ChatPrompt, Sampling, SamplingDefaults
from tests.engines import complete, running_vllm, text_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.untimed,
    pytest.mark.asyncio(loop_scope="module"),
]

# Two tokens of the bundled model's vocabulary become the reasoning tags.
_MARKS = {"<|system|>": "<think>", "<|tool|>": "</think>"}
QUESTION = ChatPrompt([{"role": "user", "content": "1+1"}])
NUMBER = {"type": "regex", "value": "[0-9]{3}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker(tmp_path_factory):
    model = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(bundled_models.ensure_tiny_model(), model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (model / name).read_text()
        for plain, mark in _MARKS.items():
            text = text.replace(plain, mark)
        (model / name).write_text(text)
    config = model / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_new_tokens": 5}))
    async with running_vllm(str(model), reasoning_parser="qwen3") as generator:
        yield generator


async def asked(thinker, sampling, chat=QUESTION, prompt=None):
    tokens = await thinker.render_chat(chat) if prompt is None else prompt
    deltas = await complete(thinker, tokens, sampling, chat)
    return "".join(d.reasoning for d in deltas), text_of(deltas), deltas


async def ended(thinker) -> int:
    [mark] = (await thinker.tokenize("</think>"))[-1:]
    return mark


async def test_the_models_limit_is_for_requests_that_state_none(thinker):
    assert thinker.sampling_defaults == SamplingDefaults(max_tokens=5)
    _, _, deltas = await asked(thinker, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert sum(len(d.token_ids) for d in deltas) == 8


async def test_a_grammar_applies_to_the_content_but_not_to_the_reasoning(thinker):
    reasoning, text, deltas = await asked(thinker, Sampling(max_tokens=8, temperature=0.0, structure=NUMBER))
    assert reasoning
    assert not reasoning.isdigit()
    assert text == ""
    assert sum(len(d.token_ids) for d in deltas) == 8
    assert deltas[-1].finish_reason == "length"
    soon = Sampling(
        max_tokens=8, temperature=0.0, structure=NUMBER, logit_bias={str(await ended(thinker)): 100.0}
    )
    reasoning, text, deltas = await asked(thinker, soon)
    assert reasoning == ""
    assert len(text) == 3
    assert text.isdigit()
    assert deltas[-1].finish_reason == "stop"


async def test_a_prompt_that_ends_the_reasoning_gets_content_at_once(thinker):
    prompt = [*await thinker.render_chat(QUESTION), await ended(thinker)]
    reasoning, text, _ = await asked(thinker, Sampling(max_tokens=8, temperature=0.0), prompt=prompt)
    assert reasoning == ""
    assert text
    reasoning, text, _ = await asked(
        thinker, Sampling(max_tokens=8, temperature=0.0, structure=NUMBER), prompt=prompt
    )
    assert (reasoning, len(text), text.isdigit()) == ("", 3, True)


async def test_the_output_of_a_plain_prompt_is_all_content(thinker):
    tokens = await thinker.tokenize("1+1")
    completion = await complete(thinker, tokens, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert text_of(completion)
    assert not any(d.reasoning for d in completion)
    structure = {"type": "json_schema", "schema": {"type": "boolean"}}
    bound = await complete(thinker, tokens, Sampling(max_tokens=8, temperature=0.0, structure=structure))
    assert json.loads(text_of(bound)) in (True, False)


async def test_a_preempted_request_resumes_in_reasoning_or_content(thinker):
    prompt = await thinker.render_chat(QUESTION)
    begun = [*await thinker.tokenize("Hm."), await ended(thinker), *await thinker.tokenize("Two")]
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    resumed = await complete(thinker, [*prompt, *begun], sampling, QUESTION, done=len(begun))
    assert text_of(resumed)
    assert not any(d.reasoning for d in resumed)
    thinking = await complete(thinker, [*prompt, *begun[:1]], sampling, QUESTION, done=1)
    assert text_of(thinking) == ""
    assert any(d.reasoning for d in thinking)


@pytest.mark.parametrize(
    ("parser", "error", "message"),
    [
        ("qwen", ValueError, r"models\.chat\.reasoning_parser=qwen: unknown to vLLM.*qwen3"),
        ("deepseek_r1", BackendDown, r"reasoning parser could not locate .*tokenizer"),
    ],
)
async def test_a_parser_that_does_not_fit_the_model_stops_the_start(parser, error, message):
    with pytest.raises(error, match=message):
        async with running_vllm(reasoning_parser=parser):
            pass
