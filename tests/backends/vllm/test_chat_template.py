"""Messages are normalised to the form that the templates of real models expect."""

import pytest

from backends import bundled_models
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt
from controlplane.core.text_limits import TextLimit

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

_HI = {"role": "user", "content": "hi"}
LIMIT = TextLimit("tiny", max_tokens=100_000, token_characters=20)
# Like published templates: tests whether calls are present, not whether they are null; concatenates text
# unchecked; reads reasoning under its older name; refuses a system message that is not the first message.
_AS_PUBLISHED = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- '[' ~ m.tool_calls[0].function.arguments | tojson ~ ']' + m.content }}
{%- else %}
{%- set thoughts = '(' ~ m.reasoning_content ~ ')' if m.reasoning_content is defined else '' %}
{{- '<' + m.role + '>' + thoughts + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


@pytest.fixture(scope="module")
def rendered():
    from transformers import AutoTokenizer

    from backends.vllm.chat_template import render

    tokenizer = AutoTokenizer.from_pretrained(bundled_models.ensure_tiny_model())

    def write(
        *messages,
        template=_AS_PUBLISHED,
        add_special_tokens=False,
        can_merge_system=False,
        tools=(),
        choice="auto",
        **options,
    ):
        tokenizer.chat_template = template
        prompt = ChatPrompt(
            messages,
            tools=tools,
            tool_choice=choice,
            template_options=options,
            add_special_tokens=add_special_tokens,
            can_merge_system=can_merge_system,
        )
        tokens = render(tokenizer, prompt, LIMIT)
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return write


def assistant(**fields):
    return {"role": "assistant", "content": "yes"} | fields


def assistant_with_call(arguments, **fields):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return assistant(tool_calls=[call]) | fields


def test_special_tokens_are_added_on_top_of_the_template(rendered):
    assert rendered(_HI, add_special_tokens=True) == "<|begin|>" + rendered(_HI)


@pytest.mark.parametrize("calls", [None, []])
def test_null_and_empty_tool_calls_are_absent(rendered, calls):
    dumped = assistant(tool_calls=calls, function_call=None, refusal=None, annotations=[], name=None)
    assert rendered(_HI, dumped) == rendered(_HI, assistant()) == "<user>hi<assistant>yes<assistant>"


def test_a_message_with_only_calls_has_empty_text(rendered):
    assert rendered(assistant_with_call('{"a": 1}', content=None)) == '[{"a": 1}]<assistant>'


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), ('{"a": ', '"{\\"a\\": "'), ("[" * 100_000, None)]
)
def test_truncated_call_arguments_are_rendered_unchanged(rendered, arguments, shown):
    shown = shown or f'"{arguments}"'
    assert rendered(assistant_with_call(arguments)) == f"[{shown}]yes<assistant>"


def test_parts_become_lines_and_empty_parts_are_dropped(rendered):
    parts = [{"type": "text", "text": text} for text in ("", "one", "", "two")]
    assert rendered(_HI | {"content": parts}) == "<user>one\ntwo<assistant>"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_accepted_under_either_name(rendered, name):
    assert rendered(assistant(**{name: "hm"})) == "<assistant>(hm)yes<assistant>"


def test_the_last_message_may_be_continued(rendered):
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(_HI, assistant(content="I am"), **options) == "<user>hi<assistant>I am"
    with pytest.raises(Refused, match="not compatible"):
        rendered(_HI, assistant(), continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("has_system", [True, False])
def test_system_messages_are_merged_at_the_head_where_the_template_refuses_them(rendered, has_system):
    first = [{"role": "system", "content": [{"type": "text", "text": "one"}]}] if has_system else []
    inline = {"role": "system", "content": [{"type": "text", "text": "two"}]}
    conversation = (*first, _HI, inline, assistant(), _HI)
    with pytest.raises(Refused, match="must be first"):
        rendered(*conversation)
    merged = "one\ntwo" if has_system else "two"
    expected = f"<system>{merged}<user>hi<assistant>yes<user>hi<assistant>"
    assert rendered(*conversation, can_merge_system=True) == expected
    refused = assistant(tool_calls=[{"function": {}}] * 2)
    with pytest.raises(Refused, match="one call at once"):
        rendered(*conversation, refused, can_merge_system=True)


def test_system_messages_stay_where_the_template_takes_them(rendered):
    conversation = (_HI, {"role": "system", "content": "two"}, _HI)
    plain = "{%- for m in messages %}{{- '<' + m.role + '>' + m.content }}{%- endfor %}"
    assert rendered(*conversation, template=plain, can_merge_system=True) == "<user>hi<system>two<user>hi"


def test_special_tokens_are_the_servers(rendered):
    """Templates write them after each message, so that one of megabytes would be multiplied by thousands."""
    with pytest.raises(Refused, match="eos_token; the server sets them"):
        rendered(_HI, eos_token="x")


def test_an_option_that_every_message_may_repeat_must_fit(rendered):
    """A template that writes it in each message would make a text of gigabytes before any limit applies."""
    style = "x" * 100_000
    assert rendered(_HI, style=style) == rendered(_HI)
    with pytest.raises(Refused, match="written in each of 4,000 messages") as caught:
        rendered(*[_HI] * 4_000, style=style)
    assert caught.value.param == "chat_template_kwargs"


def test_arguments_of_very_many_values_stay_text(rendered, monkeypatch):
    """Parsing them would hold the interpreter lock; no limit of the body counts what a string contains."""
    monkeypatch.setattr("backends.vllm.chat_template._MOST_VALUES", 100)
    few, many = f"[{'[],' * 20}0]", f"[{'[],' * 60}0]"
    assert '"[' not in rendered(_HI, assistant_with_call(few))
    assert '["[' in rendered(_HI, assistant_with_call(many))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x" * 2_000_001},
        {"role": "user", "content": [{"type": "text", "text": "x" * 1_000_001}] * 2},
        assistant_with_call("x" * 2_000_001),
    ],
    ids=["text", "parts", "arguments"],
)
def test_a_conversation_that_cannot_fit_is_refused_before_the_template_reads_it(rendered, message):
    with pytest.raises(Refused, match=r"the conversation has 2,000,0\d\d characters") as caught:
        rendered(message, template="{{ raise_exception('the template was applied') }}")
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("content", [["x" * 100] * 20_000, "x" * 2_000_000, [10**30] * 70_000])
def test_tools_that_cannot_fit_are_refused_before_the_template_writes_them(rendered, content):
    function = {"name": "f", "parameters": {"default": content}}
    asked = {
        "tools": [{"type": "function", "function": function}],
        "template": "{{ raise_exception('applied') }}",
    }
    with pytest.raises(Refused, match=r"the JSON text of the tools has 2,\d\d\d,\d\d\d characters") as caught:
        rendered(_HI, **asked)
    assert (caught.value.param, caught.value.code) == ("tools", "context_length_exceeded")
    with pytest.raises(Refused, match="applied"):
        rendered(_HI, choice="none", **asked)


def test_names_of_parts_are_no_text(rendered):
    message = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}] * 100_000}
    assert rendered(message, template="{{ messages[0].content | length }}") == "199999"
