"""A model that thinks, in a real engine: what is thought, what is said, and when a grammar binds."""

import json
import shutil

import pytest
import pytest_asyncio

from backends import bundled_models
from controlplane.core.errors import BackendDown
from controlplane.core.generation import ChatPrompt, Sampling
from tests.engines import complete, running_vllm, text_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.untimed,
    pytest.mark.asyncio(loop_scope="module"),
]

# Two tokens of the bundled model's vocabulary become the marks of thoughts.
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
    async with running_vllm(str(model), reasoning_parser="qwen3") as generator:
        yield generator


async def asked(thinker, sampling, chat=QUESTION, prompt=None):
    tokens = await thinker.render_chat(chat) if prompt is None else prompt
    deltas = await complete(thinker, tokens, sampling, chat)
    return "".join(d.reasoning for d in deltas), text_of(deltas), deltas


async def ended(thinker) -> int:
    [mark] = (await thinker.tokenize("</think>"))[-1:]
    return mark


async def test_thoughts_are_not_bound_by_a_grammar_that_the_answer_keeps(thinker):
    thoughts, text, deltas = await asked(thinker, Sampling(max_tokens=8, temperature=0.0, structure=NUMBER))
    assert thoughts
    assert not thoughts.isdigit()
    assert text == ""
    assert sum(len(d.token_ids) for d in deltas) == 8
    assert deltas[-1].finish_reason == "length"
    soon = Sampling(
        max_tokens=8, temperature=0.0, structure=NUMBER, logit_bias={str(await ended(thinker)): 100.0}
    )
    thoughts, text, deltas = await asked(thinker, soon)
    assert thoughts == ""
    assert len(text) == 3
    assert text.isdigit()
    assert deltas[-1].finish_reason == "stop"


async def test_a_prompt_that_ends_the_thoughts_is_answered_at_once(thinker):
    prompt = [*await thinker.render_chat(QUESTION), await ended(thinker)]
    thoughts, text, _ = await asked(thinker, Sampling(max_tokens=8, temperature=0.0), prompt=prompt)
    assert thoughts == ""
    assert text
    thoughts, text, _ = await asked(
        thinker, Sampling(max_tokens=8, temperature=0.0, structure=NUMBER), prompt=prompt
    )
    assert (thoughts, len(text), text.isdigit()) == ("", 3, True)


async def test_what_is_no_conversation_is_all_text(thinker):
    tokens = await thinker.tokenize("1+1")
    said = await complete(thinker, tokens, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert text_of(said)
    assert not any(d.reasoning for d in said)
    structure = {"type": "json_schema", "schema": {"type": "boolean"}}
    bound = await complete(thinker, tokens, Sampling(max_tokens=8, temperature=0.0, structure=structure))
    assert json.loads(text_of(bound)) in (True, False)


async def test_an_answer_goes_on_from_where_it_was_preempted(thinker):
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
async def test_a_parser_that_cannot_read_the_model_stops_the_start(parser, error, message):
    with pytest.raises(error, match=message):
        async with running_vllm(reasoning_parser=parser):
            pass
