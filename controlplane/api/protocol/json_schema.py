"""Finds references in a JSON schema that only lead back to themselves, so that no output satisfies them.

A schema terminates if every schema terminates that it directly requires: the target of `$ref`, all of
`allOf`, and at least one of each `anyOf` and `oneOf`. References that cannot be shown to terminate are
cyclic; an engine would compile them to a grammar that allows no token and fail on it. The search is linear
in the size of the schema (Dowling and Gallier 1984, Journal of Logic Programming 1).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

_Node = dict[str, Any] | list[Any]

MOST_NODES = 20_000
"""Lists and objects that a search takes about 15 ms for, or 50 if half of them are references."""

_INDEX = re.compile(r"[0-9]{1,9}")
_REQUIRING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
# JSON has no others, and the look-up takes a third of the time of `isinstance`.
_CONTAINERS = frozenset((dict, list))


def node_count(schema: Mapping[str, Any], most: int) -> int:
    """Lists and objects of the schema, counted up to `most`."""
    return sum(1 for _ in islice(_nodes(dict(schema)), most))


def endless_reference(schema: Mapping[str, Any]) -> str | None:
    """Returns the first `$ref` that cannot terminate, or None."""
    root = dict(schema)
    # Most schemas require no other, and terminate; they need no place in the search.
    schemas = [node for node in _nodes(root) if isinstance(node, dict) and not _REQUIRING.isdisjoint(node)]
    references = [node["$ref"] for node in schemas if "$ref" in node]
    if not references:
        return None
    nodes: list[_Node] = [*schemas, *(choices for node in schemas for choices in _choices(node))]
    needs = dict.fromkeys(map(id, nodes), 0)
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for node in nodes:
        parts = node if isinstance(node, list) else _needed(node, root)
        open_parts = [id(part) for part in parts if id(part) in needs]
        # One terminating item of a list is enough, and a value that is no schema terminates.
        is_open = 0 < len(open_parts) == len(node)
        needs[id(node)] = int(is_open) if isinstance(node, list) else len(open_parts)
        for part in open_parts:
            needed_by[part].append(id(node))
    terminated = [node for node, count in needs.items() if count == 0]
    while terminated:
        for user in needed_by[terminated.pop()]:
            needs[user] -= 1
            if needs[user] == 0:
                terminated.append(user)
    return next((ref for ref in references if needs.get(id(_target(ref, root)), 0) > 0), None)


def _nodes(root: _Node) -> Iterator[_Node]:
    """Every object and list in the schema. Iterative, because a body may nest deeply."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        inner = node if isinstance(node, list) else node.values()
        left += [value for value in inner if value.__class__ in _CONTAINERS]


def _needed(node: dict[str, Any], root: dict[str, Any]) -> list[Any]:
    parts = [_target(node.get("$ref"), root)]
    if isinstance(all_of := node.get("allOf"), list):
        parts += all_of
    return parts + _choices(node)


def _choices(node: dict[str, Any]) -> list[list[Any]]:
    """The lists of schemas of which one is enough."""
    return [choices for key in ("anyOf", "oneOf") if isinstance(choices := node.get(key), list)]


def _target(reference: object, root: dict[str, Any]) -> dict[str, Any] | None:
    """The schema at a local `$ref`; None if it is external or dangling, which the engine reports."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: Any = root
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and _INDEX.fullmatch(key) and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, dict) else None
