import json
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
    # As in the vocabularies of models that think and call.
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def _reading(tokenizer, tool_parser: str | None = "hermes", reasoning_parser: str | None = None):
    from backends.vllm.output_parsing import OutputParser

    # All that a parser may ask of a model's configuration here: its name, and its architecture for call ids.
    config = SimpleNamespace(
        model="tiny",
        hf_overrides=None,
        hf_text_config=SimpleNamespace(model_type="llama"),
        hf_config=SimpleNamespace(model_type="llama"),
    )
    return OutputParser(tool_parser, reasoning_parser, tokenizer, config)


def _steps(tokenizer, index, text) -> list[Delta]:
    """Token by token, as the engine does."""
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


def _feed(turn, tokenizer, index, text):
    read = [turn.read(step) for step in _steps(tokenizer, index, text)]
    calls = [call for step in read for call in step.tool_calls]
    return "".join(step.text for step in read), calls, read[-1].finish_reason


def _told(turn, steps) -> tuple[str, str]:
    read = [turn.read(step) for step in steps]
    return "".join(step.reasoning for step in read), "".join(step.text for step in read)


def test_a_call_is_read_out_of_the_stream(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None, PROMPT)
    content, calls, end = _feed(turn, tokenizer, 0, ANSWER)
    assert content.strip() == "Sure."
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["type"] == "function"
    assert all(call["index"] == 0 for call in calls)
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"a": 1, "b": "zwölf"}
    assert len(calls) > 3
    assert end == "tool_calls"
    assert turn.read(Delta(0, "", (), "length")).finish_reason == "length"


def test_samples_are_read_apart(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None, PROMPT)
    assert _feed(turn, tokenizer, 0, "No tool is needed.") == ("No tool is needed.", [], "stop")
    _, calls, end = _feed(turn, tokenizer, 1, ANSWER)
    assert calls
    assert end == "tool_calls"


def test_two_calls_keep_their_indices(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None, PROMPT)
    _, calls, _ = _feed(turn, tokenizer, 0, ANSWER + "\n" + ANSWER.replace("Sure. ", ""))
    assert {call["index"] for call in calls} == {0, 1}
    assert len({call["id"] for call in calls if "id" in call}) == 2


PARSERS = pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])


@PARSERS
@pytest.mark.parametrize("begin", ["<think>", ""])
def test_thoughts_are_told_from_the_answer(tokenizer, parser, begin):
    """Some models write the mark with which thoughts begin; of others the prompt ends with it."""
    turn = _reading(tokenizer, None, parser).begin(QUESTION, None, PROMPT)
    steps = _steps(tokenizer, 0, f"{begin}Two ones. 1 < 2.</think>It is 2 < 3.")
    assert _told(turn, steps) == ("Two ones. 1 < 2.", "It is 2 < 3.")


@PARSERS
def test_thoughts_that_never_end_are_thoughts(tokenizer, parser):
    turn = _reading(tokenizer, None, parser).begin(QUESTION, None, PROMPT)
    read = [turn.read(step) for step in _steps(tokenizer, 0, "<think>Let me see <")]
    assert ("".join(step.reasoning for step in read), "".join(step.text for step in read)) == (
        "Let me see <",
        "",
    )
    assert read[-1].finish_reason == "stop"


@PARSERS
def test_a_prompt_that_ends_the_thoughts_leaves_none(tokenizer, parser):
    from vllm.sampling_params import StructuredOutputsParams

    ended = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    without = ChatPrompt(CHAT.messages, template_options={"enable_thinking": False})
    structure = StructuredOutputsParams(regex="It is 2.")
    turn = _reading(tokenizer, None, parser).begin(without, structure, PROMPT + ended)
    assert turn.grammar_options["reasoning_ended"] is True
    assert turn.grammar_options["reasoning_parser_kwargs"] == {
        "chat_template_kwargs": {"enable_thinking": False}
    }
    assert _told(turn, _steps(tokenizer, 0, "It is 2.")) == ("", "It is 2.")


@PARSERS
def test_a_grammar_waits_for_the_end_of_the_thoughts(tokenizer, parser):
    from vllm.sampling_params import StructuredOutputsParams

    reading = _reading(tokenizer, None, parser)
    turn = reading.begin(QUESTION, StructuredOutputsParams(json_object=True), PROMPT)
    assert turn.structured_outputs.json_object
    assert turn.grammar_options["reasoning_ended"] is False
    assert reading.unparsed_options == {"reasoning_ended": True}
    assert _reading(tokenizer).unparsed_options == {}
    assert _reading(tokenizer).begin(CHAT, None, PROMPT).waiting == {}


@PARSERS
def test_thoughts_come_before_calls(tokenizer, parser):
    turn = _reading(tokenizer, "hermes", parser).begin(CHAT, None, PROMPT)
    read = [turn.read(step) for step in _steps(tokenizer, 0, f"<think>1 and 1</think>{ANSWER}")]
    assert "".join(step.reasoning for step in read) == "1 and 1"
    assert "".join(step.text for step in read).strip() == "Sure."
    calls = [call for step in read for call in step.tool_calls]
    assert calls[0]["function"]["name"] == "add"
    assert json.loads("".join(c["function"].get("arguments") or "" for c in calls))["b"] == "zwölf"
    assert read[-1].finish_reason == "tool_calls"


@PARSERS
@pytest.mark.parametrize("chat", [CHAT, QUESTION], ids=["tools", "no tools"])
def test_put_together_the_stream_is_vllms_whole_answer(tokenizer, parser, chat):
    from backends.vllm.output_parsing import _vllm_request

    reading = _reading(tokenizer, "hermes", parser)
    for text in (
        "a</think>b", "a b", "</think>b", "<think></think>b", "<think>a</think>", "<think>\n\n</think>\n\nb",
        f"<think>a</think>{ANSWER}", f"<think>a{ANSWER}", f"{ANSWER} c",
    ):  # fmt: skip
        steps = _steps(tokenizer, 0, text)
        parser_of_all = reading._parser(_vllm_request(chat, None))
        whole = parser_of_all.adjust_request(_vllm_request(chat, None))
        tokens = [token for step in steps for token in step.token_ids]
        reasoning, content, calls = parser_of_all.parse(
            "".join(step.text for step in steps), whole, True, model_output_token_ids=tokens
        )
        turn = reading.begin(chat, None, PROMPT)
        read = [turn.read(step) for step in steps]
        assert "".join(step.reasoning for step in read) == (reasoning or "")
        assert "".join(step.text for step in read) == (content or "")
        told = [call["function"].get("arguments") or "" for step in read for call in step.tool_calls]
        assert "".join(told) == "".join(call.arguments for call in calls or ())


@PARSERS
def test_without_tools_thoughts_are_read_too(tokenizer, parser):
    reading = _reading(tokenizer, "hermes", parser)
    for chat in (QUESTION, ChatPrompt(CHAT.messages, [ADD], "none")):
        steps = _steps(tokenizer, 0, "<think>a</think>b")
        assert _told(reading.begin(chat, None, PROMPT), steps) == ("a", "b")


@PARSERS
@pytest.mark.parametrize("begin", ["<think>", ""])
def test_a_resumed_answer_is_read_on_from_any_token(tokenizer, parser, begin):
    steps = _steps(tokenizer, 0, f"{begin}Two ones.</think>It is 2.")
    reading = _reading(tokenizer, None, parser)
    for at in range(1, len(steps)):
        before, after = steps[:at], steps[at:]
        first = reading.begin(QUESTION, None, PROMPT)
        told = _told(first, before)
        assert _told(first, [Delta(0, "", (), "preempted")]) == ("", "")
        prompt = PROMPT + [token for step in before for token in step.token_ids]
        more = _told(reading.begin(QUESTION, None, prompt, done=at), after)
        assert (told[0] + more[0], told[1] + more[1]) == ("Two ones.", "It is 2.")


def test_nothing_to_read_without_tools(tokenizer):
    reading = _reading(tokenizer)
    assert reading.begin(QUESTION, None, PROMPT) is None
    assert reading.begin(ChatPrompt(CHAT.messages, [ADD], "none"), None, PROMPT) is None
    for any_reading in (reading, _reading(tokenizer, None, "qwen3")):
        assert any_reading.begin(None, None, PROMPT) is None


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
def test_what_cannot_be_read_is_refused(tokenizer, parser, chat, message):
    with pytest.raises(Refused, match=message):
        _reading(tokenizer, parser).begin(chat, None, PROMPT)


def test_unknown_parsers_list_the_known():
    from backends.vllm.output_parsing import check_parsers

    with pytest.raises(ValueError, match=r"models\.chat\.tool_parser=hermse: unknown to vLLM.*hermes"):
        check_parsers("hermse", None)
    with pytest.raises(ValueError, match=r"models\.chat\.reasoning_parser=qwen: unknown to vLLM.*qwen3"):
        check_parsers("hermes", "qwen")


def test_the_reasoning_parser_has_one_place():
    from backends.vllm.arguments import engine_args

    folder = str(bundled_models.ensure_tiny_model())
    assert engine_args(folder, "name", {}, reasoning_parser="qwen3").reasoning_parser == "qwen3"
    with pytest.raises(ValueError, match=r"reasoning_parser is set by models\.chat\.reasoning_parser"):
        engine_args(folder, "name", {"reasoning_parser": "qwen3"})


def test_the_models_defaults_come_before_the_callers_values():
    from backends.vllm.sampling import sampling_params

    defaults = {"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1, "max_tokens": 50}
    stated = Sampling(max_tokens=80, temperature=0.9)
    params = sampling_params(stated, defaults, structure=None, skip_special_tokens=True)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.9, 7, 1.1)
    assert params.max_tokens == 50


def test_nested_engine_arguments_may_be_mappings():
    from backends.vllm.arguments import engine_args

    folder = str(bundled_models.ensure_tiny_model())
    nested = {"structured_outputs_config": {"backend": "xgrammar"}, "hf_overrides": {"a": 1}}
    args = engine_args(folder, "name", nested)
    assert args.structured_outputs_config.backend == "xgrammar"
    assert args.hf_overrides == {"a": 1}
    assert (args.model, args.served_model_name, args.disable_log_stats) == (folder, "name", True)
