"""vLLM's tool-call and reasoning parsers on a token stream, and the checks of engine arguments."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from backends import bundled_models
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, Delta, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT = ChatPrompt([{"role": "user", "content": "1+1"}], [ADD])
QUESTION = ChatPrompt(CHAT.messages)
ANSWER = 'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwölf"}}\n</tool_call>'


PROMPT = [1, 2]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_models.ensure_tiny_model())
    # As in the vocabularies of models with reasoning and tool calls.
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def _output_parser(
    tokenizer,
    tool_parser: str | None = "hermes",
    reasoning_parser: str | None = None,
    strictness: str = "auto",
):
    from backends.vllm.output_parsing import OutputParser

    # The parts of a model config that parsers read: its name, and its architecture for call ids.
    config = SimpleNamespace(
        model="tiny",
        hf_overrides=None,
        hf_text_config=SimpleNamespace(model_type="llama"),
        hf_config=SimpleNamespace(model_type="llama"),
    )
    return OutputParser(tool_parser, reasoning_parser, tokenizer, config, strictness)


def _steps(tokenizer, index, text) -> list[Delta]:
    """Deltas of one token each, as from the engine."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    before, steps = "", []
    for at in range(1, len(tokens) + 1):
        now = tokenizer.decode(tokens[:at])
        if now.endswith("\N{REPLACEMENT CHARACTER}"):
            now = before
        end = "stop" if at == len(tokens) else None
        steps.append(Delta(index, now[len(before) :], tuple(tokens[at - 1 : at]), end))
        before = now
    return steps


def _feed(conversation, tokenizer, index, text):
    read = [conversation.read(step) for step in _steps(tokenizer, index, text)]
    calls = [call for step in read for call in step.tool_calls]
    return "".join(step.text for step in read), calls, read[-1].finish_reason


def _parsed(conversation, steps) -> tuple[str, str]:
    read = [conversation.read(step) for step in steps]
    return "".join(step.reasoning for step in read), "".join(step.text for step in read)


def test_a_tool_call_is_parsed_from_the_stream(tokenizer):
    conversation = _output_parser(tokenizer).begin(CHAT, None, PROMPT)
    content, calls, end = _feed(conversation, tokenizer, 0, ANSWER)
    assert content.strip() == "Sure."
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["type"] == "function"
    assert all(call["index"] == 0 for call in calls)
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"a": 1, "b": "zwölf"}
    assert len(calls) > 3
    assert end == "tool_calls"
    assert conversation.read(Delta(0, "", (), "length")).finish_reason == "length"


def test_samples_are_parsed_independently(tokenizer):
    conversation = _output_parser(tokenizer).begin(CHAT, None, PROMPT)
    assert _feed(conversation, tokenizer, 0, "No tool is needed.") == ("No tool is needed.", [], "stop")
    _, calls, end = _feed(conversation, tokenizer, 1, ANSWER)
    assert calls
    assert end == "tool_calls"


def test_two_calls_keep_their_indices(tokenizer):
    conversation = _output_parser(tokenizer).begin(CHAT, None, PROMPT)
    _, calls, _ = _feed(conversation, tokenizer, 0, ANSWER + "\n" + ANSWER.replace("Sure. ", ""))
    assert {call["index"] for call in calls} == {0, 1}
    assert len({call["id"] for call in calls if "id" in call}) == 2


PARSERS = pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])


@PARSERS
@pytest.mark.parametrize("begin", ["<think>", ""])
def test_reasoning_is_separated_from_content(tokenizer, parser, begin):
    """Some models generate the opening tag; for others the prompt ends with it."""
    conversation = _output_parser(tokenizer, None, parser).begin(QUESTION, None, PROMPT)
    steps = _steps(tokenizer, 0, f"{begin}Two ones. 1 < 2.</think>It is 2 < 3.")
    assert _parsed(conversation, steps) == ("Two ones. 1 < 2.", "It is 2 < 3.")


@PARSERS
def test_unterminated_reasoning_is_reasoning(tokenizer, parser):
    conversation = _output_parser(tokenizer, None, parser).begin(QUESTION, None, PROMPT)
    read = [conversation.read(step) for step in _steps(tokenizer, 0, "<think>Let me see <")]
    assert ("".join(step.reasoning for step in read), "".join(step.text for step in read)) == (
        "Let me see <",
        "",
    )
    assert read[-1].finish_reason == "stop"


@PARSERS
def test_a_prompt_that_ends_the_reasoning_leaves_only_content(tokenizer, parser):
    from vllm.sampling_params import StructuredOutputsParams

    ended = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    without = ChatPrompt(CHAT.messages, template_options={"enable_thinking": False})
    structure = StructuredOutputsParams(regex="It is 2.")
    conversation = _output_parser(tokenizer, None, parser).begin(without, structure, PROMPT + ended)
    assert conversation.grammar_options["reasoning_ended"] is True
    assert conversation.grammar_options["reasoning_parser_kwargs"] == {
        "chat_template_kwargs": {"enable_thinking": False}
    }
    assert _parsed(conversation, _steps(tokenizer, 0, "It is 2.")) == ("", "It is 2.")


@PARSERS
def test_a_grammar_applies_after_the_reasoning(tokenizer, parser):
    from vllm.sampling_params import StructuredOutputsParams

    output_parser = _output_parser(tokenizer, None, parser)
    conversation = output_parser.begin(QUESTION, StructuredOutputsParams(json_object=True), PROMPT)
    assert conversation.structured_outputs.json_object
    assert conversation.grammar_options["reasoning_ended"] is False
    assert output_parser.grammar_options == {"reasoning_ended": True}
    assert _output_parser(tokenizer).grammar_options == {}
    assert _output_parser(tokenizer).begin(CHAT, None, PROMPT).grammar_options == {}


@PARSERS
def test_reasoning_comes_before_calls(tokenizer, parser):
    conversation = _output_parser(tokenizer, "hermes", parser).begin(CHAT, None, PROMPT)
    read = [conversation.read(step) for step in _steps(tokenizer, 0, f"<think>1 and 1</think>{ANSWER}")]
    assert "".join(step.reasoning for step in read) == "1 and 1"
    assert "".join(step.text for step in read).strip() == "Sure."
    calls = [call for step in read for call in step.tool_calls]
    assert calls[0]["function"]["name"] == "add"
    assert json.loads("".join(c["function"].get("arguments") or "" for c in calls))["b"] == "zwölf"
    assert read[-1].finish_reason == "tool_calls"


@PARSERS
@pytest.mark.parametrize("chat", [CHAT, QUESTION], ids=["tools", "no tools"])
def test_the_joined_stream_equals_vllms_non_streaming_result(tokenizer, parser, chat):
    from backends.vllm.output_parsing import _vllm_request

    output_parser = _output_parser(tokenizer, "hermes", parser)
    for text in (
        "a</think>b", "a b", "</think>b", "<think></think>b", "<think>a</think>", "<think>\n\n</think>\n\nb",
        f"<think>a</think>{ANSWER}", f"<think>a{ANSWER}", f"{ANSWER} c",
    ):  # fmt: skip
        steps = _steps(tokenizer, 0, text)
        parser_of_all = output_parser._parser(_vllm_request(chat, None))
        whole = parser_of_all.adjust_request(_vllm_request(chat, None))
        tokens = [token for step in steps for token in step.token_ids]
        reasoning, content, calls = parser_of_all.parse(
            "".join(step.text for step in steps), whole, True, model_output_token_ids=tokens
        )
        conversation = output_parser.begin(chat, None, PROMPT)
        read = [conversation.read(step) for step in steps]
        assert "".join(step.reasoning for step in read) == (reasoning or "")
        assert "".join(step.text for step in read) == (content or "")
        parsed = [call["function"].get("arguments") or "" for step in read for call in step.tool_calls]
        assert "".join(parsed) == "".join(call.arguments for call in calls or ())


@PARSERS
def test_reasoning_is_parsed_without_tools(tokenizer, parser):
    output_parser = _output_parser(tokenizer, "hermes", parser)
    for chat in (QUESTION, ChatPrompt(CHAT.messages, [ADD], "none")):
        steps = _steps(tokenizer, 0, "<think>a</think>b")
        assert _parsed(output_parser.begin(chat, None, PROMPT), steps) == ("a", "b")


@PARSERS
@pytest.mark.parametrize("begin", ["<think>", ""])
def test_a_resumed_request_is_parsed_on_from_any_token(tokenizer, parser, begin):
    steps = _steps(tokenizer, 0, f"{begin}Two ones.</think>It is 2.")
    output_parser = _output_parser(tokenizer, None, parser)
    for at in range(1, len(steps)):
        before, after = steps[:at], steps[at:]
        first = output_parser.begin(QUESTION, None, PROMPT)
        parsed = _parsed(first, before)
        assert _parsed(first, [Delta(0, "", (), "preempted")]) == ("", "")
        prompt = PROMPT + [token for step in before for token in step.token_ids]
        more = _parsed(output_parser.begin(QUESTION, None, prompt, resumed_tokens=at), after)
        assert (parsed[0] + more[0], parsed[1] + more[1]) == ("Two ones.", "It is 2.")


def test_conversations_without_tools_or_reasoning_are_not_parsed(tokenizer):
    output_parser = _output_parser(tokenizer)
    assert output_parser.begin(QUESTION, None, PROMPT) is None
    assert output_parser.begin(ChatPrompt(CHAT.messages, [ADD], "none"), None, PROMPT) is None
    for any_parser in (output_parser, _output_parser(tokenizer, None, "qwen3")):
        assert any_parser.begin(None, None, PROMPT) is None


@pytest.mark.parametrize(
    ("parser", "chat", "message"),
    [
        (None, CHAT, r"models\.chat\.tool_parser"),
        ("hermes", ChatPrompt(CHAT.messages, [], "required"), "needs tools"),
        ("hermes", ChatPrompt(CHAT.messages, [{"type": "function", "function": {}}]), "name"),
        ("hermes", ChatPrompt(CHAT.messages, [ADD], "sometimes"), "tool_choice"),
        ("hermes", ChatPrompt(CHAT.messages, [ADD], {"function": {"name": "sub"}}), "'sub'.*'add'"),
    ],
)
def test_requests_that_cannot_be_parsed_are_refused(tokenizer, parser, chat, message):
    with pytest.raises(Refused, match=message):
        _output_parser(tokenizer, parser).begin(chat, None, PROMPT)


async def test_costly_conversions_leave_the_loop_to_others_in_between(tokenizer):
    output_parser = _output_parser(tokenizer)
    chat = ChatPrompt(CHAT.messages, [ADD], "required")
    iterations, converted_at = 0, []

    def counts():
        nonlocal iterations
        iterations += 1
        loop.call_soon(counts)

    async def convert(call) -> None:
        assert await call is not None
        converted_at.append(iterations)

    loop = asyncio.get_running_loop()
    loop.call_soon(counts)
    calls = [output_parser.async_constraint(chat, None) for _ in range(4)]
    calls += [output_parser.async_begin(chat, None, PROMPT) for _ in range(4)]
    await asyncio.gather(*map(convert, calls))
    # Each in an iteration of its own.
    assert len(set(converted_at)) == len(converted_at) == 8


async def test_what_costs_nothing_waits_for_no_turn(tokenizer):
    output_parser = _output_parser(tokenizer)
    async with output_parser._turn:
        assert await output_parser.async_begin(QUESTION, None, PROMPT) is None
        assert await output_parser.async_constraint(None, None) is None


NAMED = {"type": "function", "function": {"name": "f"}}


def _arguments_schema(output_parser, choice: object, **function: object) -> object:
    """What the grammar of a request with one tool admits as arguments; None without a grammar."""
    tool = {"type": "function", "function": {"name": "f", **function}}
    constraint = output_parser.constraint(ChatPrompt(CHAT.messages, [tool], choice), None)
    if constraint is None:
        return None
    found = []

    def search(node: object) -> None:
        if isinstance(node, dict):
            found.extend([node["json_schema"]] if "json_schema" in node else [])
            node = list(node.values())
        for inner in node if isinstance(node, list) else ():
            search(inner)

    search(json.loads(constraint.structural_tag))
    # Hermes's grammar has two forms of each call.
    assert all(schema == found[0] for schema in found)
    return found[0]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": True}])
def test_required_calls_follow_the_schema(tokenizer, choice, strict):
    output_parser = _output_parser(tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert _arguments_schema(output_parser, choice, parameters=schema, **strict) == schema
    for absent in ({}, {"parameters": None}, {"parameters": {}}):
        assert _arguments_schema(output_parser, choice, **absent, **strict) == {"type": "object"}
    composed = {"anyOf": [schema]}
    assert _arguments_schema(output_parser, choice, parameters=composed) == composed


def test_strictness_of_calls_that_the_model_chooses(tokenizer):
    schema = {"type": "object", "properties": {}}
    found = [
        _arguments_schema(_output_parser(tokenizer, strictness=level), "auto", parameters=schema)
        for level in ("auto", "function", "parameter")
    ]
    assert found == [None, True, schema]
    with pytest.raises(ValueError, match="sometimes"):
        _output_parser(tokenizer, strictness="sometimes")


def test_unknown_parsers_list_the_known():
    from backends.vllm.output_parsing import check_parsers

    with pytest.raises(ValueError, match=r"models\.chat\.tool_parser=hermse: unknown to vLLM.*hermes"):
        check_parsers("hermse", None)
    with pytest.raises(ValueError, match=r"models\.chat\.reasoning_parser=qwen: unknown to vLLM.*qwen3"):
        check_parsers("hermes", "qwen")


def test_the_reasoning_parser_cannot_be_an_engine_argument():
    from backends.vllm.arguments import engine_args

    folder = str(bundled_models.ensure_tiny_model())
    assert engine_args(folder, "name", {}, reasoning_parser="qwen3").reasoning_parser == "qwen3"
    with pytest.raises(ValueError, match=r"reasoning_parser is set by models\.chat\.reasoning_parser"):
        engine_args(folder, "name", {"reasoning_parser": "qwen3"})


def test_request_values_override_the_models_defaults():
    from backends.vllm.sampling import sampling_params

    defaults = {
        "temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1, "presence_penalty": 1.5,
        "frequency_penalty": 1.5, "max_tokens": 50,
    }  # fmt: skip
    stated = Sampling(max_tokens=80, temperature=0.9, frequency_penalty=0.0)
    params = sampling_params(stated, defaults, structure=None, skip_special_tokens=True, vocabulary=9)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.9, 7, 1.1)
    assert (params.presence_penalty, params.frequency_penalty, params.max_tokens) == (1.5, 0.0, 80)


@pytest.mark.parametrize(
    ("source", "overrides", "limits"),
    [
        ("auto", {}, (512, None)),
        ("auto", {"max_new_tokens": 64}, (64, 64)),
        ("vllm", {"max_new_tokens": 64}, (64, 64)),
        ("vllm", {}, (None, None)),
        ("a/folder", {}, (512, 512)),
    ],
)
def test_only_the_operators_limit_bounds_every_request(source, overrides, limits):
    from vllm.config import ModelConfig

    from backends.vllm.sampling import defaults_of

    config = SimpleNamespace(
        generation_config=source,
        override_generation_config=overrides,
        try_get_generation_config=lambda: {"max_new_tokens": 512, "presence_penalty": 1.5},
    )
    config.get_diff_sampling_param = partial(ModelConfig.get_diff_sampling_param, config)
    _, defaults = defaults_of(config)
    assert (defaults.max_tokens, defaults.max_tokens_limit) == limits
    assert defaults.presence_penalty == (None if source == "vllm" else 1.5)


@pytest.mark.parametrize("is_disabled", [True, False])
def test_the_progress_bar_of_the_weights_is_off_with_the_others(monkeypatch, is_disabled):
    """`set_engine_log_level` sets the variable."""
    from backends.vllm.arguments import engine_args

    monkeypatch.setenv("TQDM_DISABLE", "1" if is_disabled else "")
    folder = str(bundled_models.ensure_tiny_model())
    assert engine_args(folder, "name", {}).use_tqdm_on_load != is_disabled
    assert engine_args(folder, "name", {"use_tqdm_on_load": True}).use_tqdm_on_load


def test_nested_engine_arguments_may_be_mappings():
    from backends.vllm.arguments import engine_args

    folder = str(bundled_models.ensure_tiny_model())
    nested = {"structured_outputs_config": {"backend": "xgrammar"}, "hf_overrides": {"a": 1}}
    args = engine_args(folder, "name", nested)
    assert args.structured_outputs_config.backend == "xgrammar"
    assert args.hf_overrides == {"a": 1}
    assert (args.model, args.served_model_name, args.disable_log_stats) == (folder, "name", True)
