"""Bounds of a grammar's text: each names the value, the key and the remedy, and costs little."""

import json

import pytest

from backends.vllm.grammar_limits import GrammarLimits, GrammarText
from controlplane.config import parse
from controlplane.config.limits_section import LimitsSection
from controlplane.core.errors import Refused
from controlplane.service.engine_builders import _grammar_limits

LIMITS = GrammarLimits(
    max_grammar=65_536, max_schema=524_288, max_grammar_properties=1_000, max_grammar_choices=5_000,
    max_grammar_repeat=5_000, grammar_ms=10_000, grammar_step_ms=100,
    grammar_memory=128 * 2**20,
)  # fmt: skip


def check(text: GrammarText) -> None:
    text.check_size(LIMITS)
    text.check_content(LIMITS)


def an_object(properties: int, kind: object = None) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {f"p{at}": kind or {"type": "string"} for at in range(properties)},
    }


# kind, value, key, a part of the message
REFUSED = [
    ("json", an_object(2_000), "max_grammar_properties", "has 2,000 properties in one object"),
    ("json", an_object(20_000), "max_schema", "bytes"),
    ("json", {"description": "x" * 524_288}, "max_schema", "524,307 bytes"),
    ("json", an_object(1, an_object(1_001)), "max_grammar_properties", "has 1,001 properties"),
    ("json", {"type": "string", "maxLength": 1_000_000}, "max_grammar_repeat", "maxLength=1,000,000"),
    ("json", {"items": {"minItems": 1e6}}, "max_grammar_repeat", "minItems=1,000,000"),
    ("json", {"type": "string", "pattern": "a{9999}"}, "max_grammar_repeat", "{9999}"),
    ("json", {"patternProperties": {"^a{9999}$": {}}}, "max_grammar_repeat", "{9999}"),
    ("json", {"enum": [str(at) for at in range(5_001)]}, "max_grammar_choices", "5,001 values of one enum"),
    ("json", json.dumps({"type": "string", "maxLength": 1_000_000}), "max_grammar_repeat", "maxLength"),
    ("structural_tag", json.dumps({"format": an_object(1_001)}), "max_grammar_properties", "1,001"),
    ("choice", ["x"] * 100_000, "max_grammar_choices", "100,000 choices"),
    ("choice", ["x" * 65_536], "max_grammar", "65,540 bytes"),
    ("regex", "a" * 200_000, "max_grammar", "200,000 bytes"),
    ("regex", "(a{1,100}b){2,100000}", "max_grammar_repeat", "{2,100000}"),
    ("regex", "a{" + "9" * 5_000 + "}", "max_grammar_repeat", "{99999"),
    ("regex", r"\\{99999}", "max_grammar_repeat", "{99999}"),
    ("grammar", 'root ::= "' + "a" * 65_536 + '"', "max_grammar", "bytes"),
]


@pytest.mark.parametrize(("kind", "value", "key", "cause"), REFUSED)
def test_a_grammar_beyond_a_limit_is_refused(kind: str, value: object, key: str, cause: str):
    with pytest.raises(Refused) as refused:
        check(GrammarText(kind, value))
    message = str(refused.value)
    assert cause in message and f"server.limits.{key} is {getattr(LIMITS, key):,}" in message
    assert "or raise the limit" in message and len(message) < 300
    assert refused.value.code == "grammar_too_complex"
    assert refused.value.param == GrammarText(kind, value).param


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", an_object(1_000)),
        ("json", an_object(4, an_object(900))),
        ("json", {"type": "object", "properties": {"maxLength": {"type": "string", "maxLength": 5_000}}}),
        ("json", {"properties": {"enum": {"type": "string"}, "pattern": {"type": "integer"}}}),
        ("json", '{"type": "string"}'),
        ("choice", [str(at) for at in range(5_000)]),
        ("regex", r"a{5000}\{99999\}\\\{99999}"),
        ("grammar", 'root ::= "{99999}"'),
        ("structural_tag", "{}"),
    ],
)
def test_a_grammar_within_the_limits_is_accepted(kind: str, value: object):
    check(GrammarText(kind, value))


@pytest.mark.parametrize("text", ["", "{", "not JSON", '{"a": 1} 2'])
def test_a_schema_that_is_not_json_is_refused(text: str):
    with pytest.raises(Refused, match=r"the JSON schema is not valid JSON: .*; correct it") as refused:
        check(GrammarText("json", text))
    assert refused.value.param == "response_format"


def test_the_grammar_of_tools_is_named_as_the_tools():
    with pytest.raises(Refused, match="the grammar of the tools") as refused:
        check(GrammarText("json", an_object(1_001), is_of_tools=True))
    assert refused.value.param == "tools"


def test_the_limits_are_those_of_the_configuration():
    limits = {"max_grammar": "1KiB", "max_schema": "2KiB", "grammar_ms": 0, "grammar_step_ms": 7}
    found = _grammar_limits(parse({"models": {"chat": {"model": "m"}}, "server": {"limits": limits}}))
    assert (found.max_grammar, found.max_schema) == (1_024, 2_048)
    assert (found.grammar_ms, found.grammar_step_ms) == (0, 7)
    assert found.max_grammar_choices == LimitsSection().max_grammar_choices


def test_a_text_of_any_size_is_refused_by_its_size_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json, "dumps", lambda _: pytest.fail("the choices were encoded"))
    with pytest.raises(Refused, match="100,000 choices"):
        GrammarText("choice", ["x"] * 100_000).check_size(LIMITS)
