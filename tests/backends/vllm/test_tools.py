import json
from types import SimpleNamespace

import pytest

from backends import tiny
from controlplane.core.ports import ChatPrompt, Refused, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT = ChatPrompt([{"role": "user", "content": "1+1"}], [ADD])
ANSWER = 'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwölf"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.ensure_tiny_model())


def _reading(tokenizer, parser="hermes"):
    from backends.vllm.tools import ToolReading

    # All that a parser may ask of a model's configuration here: its name, and its architecture for call ids.
    config = SimpleNamespace(
        model="tiny", hf_overrides=None, hf_text_config=SimpleNamespace(model_type="llama")
    )
    return ToolReading(parser, tokenizer, config)


def _feed(turn, tokenizer, index, text):
    """Token by token, as the engine does."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    before, content, calls = "", "", []
    for at in range(1, len(tokens) + 1):
        now = tokenizer.decode(tokens[:at])
        if now.endswith("\N{REPLACEMENT CHARACTER}"):
            now = before
        piece, new = turn.read(
            index, now[len(before) :], tokens[at - 1 : at], [1, 2], finished=at == len(tokens)
        )
        content, before = content + piece, now
        calls += new
    return content, calls


def test_a_call_is_read_out_of_the_stream(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None)
    content, calls = _feed(turn, tokenizer, 0, ANSWER)
    assert content.strip() == "Sure."
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["type"] == "function"
    assert all(call["index"] == 0 for call in calls)
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"a": 1, "b": "zwölf"}
    assert len(calls) > 3
    assert turn.finish_reason(0, "stop") == "tool_calls"
    assert turn.finish_reason(0, "length") == "length"
    assert turn.finish_reason(0, None) is None


def test_samples_are_read_apart(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None)
    content, calls = _feed(turn, tokenizer, 0, "No tool is needed.")
    assert (content, calls) == ("No tool is needed.", [])
    assert _feed(turn, tokenizer, 1, ANSWER)[1]
    assert turn.finish_reason(0, "stop") == "stop"
    assert turn.finish_reason(1, "stop") == "tool_calls"


def test_two_calls_keep_their_indices(tokenizer):
    turn = _reading(tokenizer).begin(CHAT, None)
    _, calls = _feed(turn, tokenizer, 0, ANSWER + "\n" + ANSWER.replace("Sure. ", ""))
    assert {call["index"] for call in calls} == {0, 1}
    assert len({call["id"] for call in calls if "id" in call}) == 2


def test_nothing_to_read_without_tools(tokenizer):
    reading = _reading(tokenizer)
    assert reading.begin(None, None) is None
    assert reading.begin(ChatPrompt(CHAT.messages), None) is None
    assert reading.begin(ChatPrompt(CHAT.messages, [ADD], "none"), None) is None


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
        _reading(tokenizer, parser).begin(chat, None)


def test_unknown_parser_lists_the_known(tokenizer):
    with pytest.raises(ValueError, match=r"models\.chat\.tool_parser=hermse: vLLM has .*hermes"):
        _reading(tokenizer, "hermse")


def test_the_models_defaults_come_before_the_callers_values():
    from backends.vllm.sampling import sampling_params

    defaults = {"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1, "max_tokens": 50}
    stated = Sampling(max_tokens=80, temperature=0.9)
    params = sampling_params(stated, defaults, structure=None, skip_special_tokens=True)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.9, 7, 1.1)
    assert params.max_tokens == 50


def test_nested_engine_arguments_may_be_mappings():
    from backends.vllm.arguments import engine_args

    folder = str(tiny.ensure_tiny_model())
    nested = {"structured_outputs_config": {"backend": "xgrammar"}, "hf_overrides": {"a": 1}}
    args = engine_args(folder, "name", nested)
    assert args.structured_outputs_config.backend == "xgrammar"
    assert args.hf_overrides == {"a": 1}
    assert (args.model, args.served_model_name, args.disable_log_stats) == (folder, "name", True)
