"""Finds the line of a key in a YAML text, for error messages."""

from collections.abc import Sequence

import yaml


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line, from 1, of the last of these keys and list positions that the text has; None without any."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    line = None
    for step in path:
        named, node = _child(node, step)
        if named is None:
            break
        line = named.start_mark.line + 1
    return line


def _child(node: yaml.Node | None, step: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    """Where the text names this key or position of `node`, and its value."""
    if isinstance(node, yaml.MappingNode):
        return next(((name, value) for name, value in node.value if name.value == step), (None, None))
    if isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
        return node.value[int(step)], node.value[int(step)]
    return None, None
