"""Changes values in the text of a YAML file; every other byte, comments included, stays as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import yaml

from benchmark_control_plane.common.command_line import BadInput
from controlplane.config import ConfigError
from controlplane.config.loader import yaml_content

_WIDTH = 108
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Edit:
    """A new value of the key at `path`; the comment `mark` goes above it unless it is empty."""

    path: Sequence[str]
    value: object
    mark: str


def edited_yaml(text: str, edits: Sequence[Edit], expected: Mapping[str, Any], *, source: str) -> str:
    """The text with these edits, whose content is `expected`.

    Raises BadInput where the file has a form that is not edited, such as a value that is an alias.
    """
    line_end = "\r\n" if "\r\n" in text else "\n"
    try:
        for edit in edits:
            text = _with_mark(_with_value(text, edit, line_end), edit, line_end)
        is_edited = yaml_content(text, source=source) == expected
    except (yaml.YAMLError, ConfigError):
        is_edited = False
    if not is_edited:
        values = "".join(f"\n  {'.'.join(edit.path)}: {_scalar(edit.value)}" for edit in edits)
        raise BadInput(
            f"{source}: cannot be edited, perhaps because of an alias (*name); change by hand:{values}"
        )
    return text


def _with_value(text: str, edit: Edit, line_end: str) -> str:
    depth, parent, node = _deepest(text, edit.path)
    rest, value = edit.path[depth:], _scalar(edit.value)
    if node is not None and not (rest and isinstance(node, yaml.MappingNode)):
        # The value of the key itself, or a section without a value.
        new = f"{{{_flow(rest, value)}}}" if rest else value
        start, end = node.start_mark.index, node.end_mark.index
        gap = " " if start == end and text[start - 1] == ":" else ""
        return f"{text[:start]}{gap}{new}{text[end:]}"
    mapping = node or parent
    if mapping.flow_style:
        return _into_flow(text, mapping, _flow(rest, value))
    indent = mapping.start_mark.column
    at = text.find("\n", _last_leaf(mapping).end_mark.index)
    lines = [" " * (indent + _INDENT * level) + f"{key}:" for level, key in enumerate(rest)]
    lines[-1] += f" {value}"
    addition = line_end.join(lines)
    if at < 0:
        return text + ("" if text.endswith("\n") else line_end) + addition + line_end
    return f"{text[: at + 1]}{addition}{line_end}{text[at + 1 :]}"


def _with_mark(text: str, edit: Edit, line_end: str) -> str:
    """The text with the edit's comment above the innermost key of its path that has a line of its own.

    A file in braces, such as JSON, has none of them, and gets no comment.
    """
    if not edit.mark:
        return text
    node, key = yaml.compose(text), None
    for part in edit.path:
        if isinstance(node, yaml.SequenceNode) and not node.flow_style:
            node = node.value[int(part)]
            continue
        if isinstance(node, yaml.SequenceNode):
            break
        assert isinstance(node, yaml.MappingNode)
        name, inner = next((k, v) for k, v in node.value if k.value == part)
        if node.flow_style:
            break
        key, node = name, inner
    if key is None:
        return text
    at, indent = key.start_mark.index - key.start_mark.column, " " * key.start_mark.column
    comment = "".join(f"{indent}# {line}{line_end}" for line in wrap(edit.mark, _WIDTH - len(indent)))
    return text[:at] + comment + text[at:]


def _deepest(text: str, path: Sequence[str]) -> tuple[int, yaml.MappingNode, yaml.Node | None]:
    """How many keys of the path exist, the mapping that holds the last of them, and its value."""
    node: yaml.Node | None = yaml.compose(text)
    assert isinstance(node, yaml.MappingNode)
    parent = node
    for depth, part in enumerate(path):
        if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            continue
        if not isinstance(node, yaml.MappingNode):
            return depth, parent, node
        inner = next((value for key, value in node.value if key.value == part), None)
        if inner is None:
            return depth, node, node
        parent, node = node, inner
    return len(path), parent, node


def _into_flow(text: str, mapping: yaml.MappingNode, entry: str) -> str:
    at = mapping.end_mark.index - 1
    before = text[:at].rstrip()
    gap = "" if before.endswith("{") else " " if before.endswith(",") else ", "
    return f"{before}{gap}{entry}{text[at:]}"


def _last_leaf(node: yaml.Node) -> yaml.Node:
    """The last value in a node; the end of a block mapping lies beyond the comments that follow it."""
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    return node


def _flow(path: Sequence[str], value: str) -> str:
    first, *rest = path
    return f"{first}: {{{_flow(rest, value)}}}" if rest else f"{first}: {value}"


def _scalar(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
