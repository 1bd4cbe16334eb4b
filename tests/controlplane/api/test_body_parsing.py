"""Limits of a body's structure: measured on the bytes, before anything is parsed."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.api.body_parsing import Structure, check_structure, structure_of
from controlplane.api.errors import Problem
from controlplane.api.settings import BodyLimits

names = st.text(max_size=6) | st.sampled_from(['"', "\\", '\\"', "a:b", "[{,", "\\\\"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def members(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(members, value.values()))
    return sum(map(members, value)) if isinstance(value, list) else 0


def items(value: Any) -> int:
    if isinstance(value, dict | list):
        return len(value) + sum(map(items, value.values() if isinstance(value, dict) else value))
    return 0


@given(values)
@pytest.mark.parametrize("option", [0, orjson.OPT_INDENT_2])
def test_structure_of_any_value(option: int, value: Any):
    text = orjson.dumps(value, option=option)
    found = structure_of(text)
    assert found.max_depth == depth(value)
    assert found.max_members == members(value)
    assert items(value) <= found.max_values <= items(value) + text.count(b"[]") + text.count(b"{}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"abc": 1}', Structure(1, 1, 1, 3)),
        (b'{"a\\"b" : [1, 2, {"c": ":,[{"}]}', Structure(3, 2, 5, 4)),
        (b'{"\\\\": {"\\\\\\"": 1}}', Structure(2, 2, 2, 4)),
        (b"[[], [], 1]", Structure(2, 0, 5, 0)),
        (b"1", Structure(0, 0, 0, 0)),
        (b"", Structure(0, 0, 0, 0)),
        (b'"unterminated [[[', Structure(0, 0, 0, 0)),
        (b":::", Structure(0, 3, 0, 0)),
    ],
)
def test_structure(text: bytes, expected: Structure):
    assert structure_of(text) == expected


LIMITS = BodyLimits(inline_body=100, max_depth=3, max_members=5, max_values=20, max_name=8)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b'{"a":{"a":{"a":{"a":1}}}}', "max_depth"),
        (b"[[[[1]]]]", "max_depth"),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', "max_members"),
        (b"[" + b",".join([b"1"] * 22) + b"]", "max_values"),
        (b'{"' + b"n" * 100 + b'":1}', "max_name"),
    ],
)
def test_limit_is_named(text: bytes, limit: str):
    with pytest.raises(Problem, match=rf"server\.limits\.{limit} is") as problem:
        check_structure(text, LIMITS)
    assert problem.value.failure.status == 400


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"a":{"a":1}}}',
        b'{"a":1,"b":1,"c":1,"d":1,"e":1}',
        b'{"text":"' + b"[[[[{{{{::::::::" * 50 + b'"}',
        b'{"text":"' + b"," * 500 + b'"}',
    ],
)
def test_body_within_the_limits(text: bytes):
    check_structure(text, LIMITS)
