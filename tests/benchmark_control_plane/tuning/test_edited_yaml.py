"""Edits of a YAML text: the values change, and every comment and other line stays."""

from pathlib import Path

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.tuning.edited_yaml import Edit, edited_yaml
from benchmark_control_plane.tuning.search_space import with_value
from controlplane.config.loader import yaml_content


def edited(text, values, mark="why"):
    expected = yaml_content(text, source="f")
    for path, value in values.items():
        expected = with_value_at(expected, path.split("."), value)
    edits = [Edit(path.split("."), value, mark) for path, value in values.items()]
    return edited_yaml(text, edits, expected, source="f")


def with_value_at(content, path, value):
    first, *rest = path
    if isinstance(content, list):
        at = int(first)
        return [*content[:at], with_value_at(content[at], rest, value), *content[at + 1 :]]
    inner = (content or {}).get(first)
    return {**(content or {}), first: with_value_at(inner, rest, value) if rest else value}


@pytest.mark.parametrize("name", ["dev", "colocated"])
def test_the_packaged_files_keep_every_comment(name):
    text = Path(f"configs/{name}.yaml").read_text(encoding="utf-8")
    values = {"admission.max_wait_ms": 15_000, "admission.defer_threshold_ms": 50}
    values |= {"scheduling.engine.ordering": "edf", "quota.forecast.quantile": None}
    found = edited(text, values)
    kept = [line for line in found.splitlines() if "# why" not in line]
    comments = [line[line.index("#") :] for line in text.splitlines() if "#" in line]
    assert comments
    for comment in comments:
        assert any(comment in other for other in kept), comment
    changed = set(found.splitlines()) - set(text.splitlines())
    assert len(changed) <= 2 + len(values) * 2
    assert found.count("# why") == len(values)


@pytest.mark.parametrize(
    ("text", "path", "value", "result"),
    [
        ("a:\n  b: 1 # one\n\n# two\nc: 3\n", "a.b", 2, "a:\n  # why\n  b: 2 # one\n\n# two\nc: 3\n"),
        ("a:\n  b: 1\n  # last\n\nc: 3\n", "a.d", True, "a:\n  b: 1\n  # why\n  d: true\n  # last\n\nc: 3\n"),
        ("a: {b: 1}  # flow\n", "a.d", None, "# why\na: {b: 1, d: null}  # flow\n"),
        ("a: {}\n", "a.b.c", 0.5, "# why\na: {b: {c: 0.5}}\n"),
        ("a:\n- b: 1\n- c: 2 # x\nd: 3\n", "a.1.c", 4, "a:\n- b: 1\n  # why\n- c: 4 # x\nd: 3\n"),
        ("a:\n- b: 1\n  c: 2\nd: 3\n", "a.0.e", 4, "a:\n- b: 1\n  c: 2\n  # why\n  e: 4\nd: 3\n"),
        ("a: [{b: 1}]\n", "a.0.c", 4, "# why\na: [{b: 1, c: 4}]\n"),
        ("a:\nb: 1\n", "a.x", "edf", "# why\na: {x: edf}\nb: 1\n"),
        ("b: 1", "a.x.y", 1, "b: 1\na:\n  x:\n    # why\n    y: 1\n"),
        ("a: 'x'\r\nb: 1\r\n", "a", "y", "# why\r\na: y\r\nb: 1\r\n"),
        ('{"a": {"b": 1}}\n', "a.c", 2, '{"a": {"b": 1, c: 2}}\n'),
        ("{a: {b: 1},\n c: 2}\n", "a.b", 3, "{a: {b: 3},\n c: 2}\n"),
        ("a:\n  b: [1,\n   2]\n  c: 1\n", "a.d", 3, "a:\n  b: [1,\n   2]\n  c: 1\n  # why\n  d: 3\n"),
    ],
)
def test_value_and_mark_are_placed(text, path, value, result):
    assert edited(text, {path: value}) == result


def test_an_alias_is_refused_and_not_changed_elsewhere():
    with pytest.raises(BadInput, match=r"alias \(\*name\); change by hand:\n  b: 2$"):
        edited("a: &x 1\nb: *x\n", {"b": 2})


def test_an_edit_without_a_reason_has_no_mark():
    assert edited("a: 1\n", {"a": 2}, mark="") == "a: 2\n"


def test_search_space_and_editor_agree():
    text = "models: {chat: {model: m}}\nquota: {llm: {nominal: 0.9}, embedding: {nominal: 0.1}}\n"
    expected = with_value(yaml_content(text, source="f"), "quota.llm.nominal", 0.7)
    edits = [Edit(["quota", "llm", "nominal"], 0.7, ""), Edit(["quota", "embedding", "nominal"], 0.3, "")]
    assert "llm: {nominal: 0.7}, embedding: {nominal: 0.3}" in edited_yaml(text, edits, expected, source="f")
