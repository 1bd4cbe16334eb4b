"""What clients send of a conversation is written as the templates of real models expect it."""

import pytest

from backends import bundled_models
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

_HI = {"role": "user", "content": "hi"}
# As published templates do: they ask whether there are calls, not whether that is null, join text without a
# look at it, and know thoughts by their older name.
_AS_PUBLISHED = """\
{%- for m in messages %}
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
def written():
    from transformers import AutoTokenizer

    from backends.vllm.chat_template import render

    tokenizer = AutoTokenizer.from_pretrained(bundled_models.ensure_tiny_model())
    tokenizer.chat_template = _AS_PUBLISHED

    def write(*messages, **options):
        tokens = render(tokenizer, ChatPrompt(messages, template_options=options))
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return write


def said(**fields):
    return {"role": "assistant", "content": "yes"} | fields


def called(arguments, **fields):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return said(tool_calls=[call]) | fields


@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_without_calls_has_none(written, calls):
    dumped = said(tool_calls=calls, function_call=None, refusal=None, annotations=[], name=None)
    assert written(_HI, dumped) == written(_HI, said()) == "<user>hi<assistant>yes<assistant>"


def test_an_answer_that_only_calls_has_the_empty_text(written):
    assert written(called('{"a": 1}', content=None)) == '[{"a": 1}]<assistant>'


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), ('{"a": ', '"{\\"a\\": "'), ("[" * 100_000, None)]
)
def test_a_call_that_was_cut_short_is_shown_as_it_is(written, arguments, shown):
    shown = shown or f'"{arguments}"'
    assert written(called(arguments)) == f"[{shown}]yes<assistant>"


def test_parts_are_lines_and_empty_ones_nothing(written):
    parts = [{"type": "text", "text": text} for text in ("", "one", "", "two")]
    assert written(_HI | {"content": parts}) == "<user>one\ntwo<assistant>"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_are_found_by_either_name(written, name):
    assert written(said(**{name: "hm"})) == "<assistant>(hm)yes<assistant>"


def test_the_last_message_may_be_continued(written):
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert written(_HI, said(content="I am"), **options) == "<user>hi<assistant>I am"
    with pytest.raises(Refused, match="not compatible"):
        written(_HI, said(), continue_final_message=True, add_generation_prompt=True)
