"""Could any answer satisfy this JSON schema? None can where a reference leads to nothing but references.

Rule: a schema comes to an end if everything does that it refers to at once: by `$ref`, in `allOf`, and one
at least in each of `anyOf` and `oneOf`. What is left when no more can be found to end leads only back to
itself. An engine makes a grammar of it that allows no token, and fails when it gets there. The search is
linear in the schema (Dowling and Gallier 1984, Journal of Logic Programming 1).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_Node = dict[str, Any] | list[Any]

_INDEX = re.compile(r"[0-9]{1,9}")


def endless_reference(schema: Mapping[str, Any]) -> str | None:
    """The first that is found."""
    root = dict(schema)
    nodes = list(_nodes(root))
    needs: dict[int, int] = {}
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    for node in nodes:
        parts = node if isinstance(node, list) else _needed(node, root)
        open_parts = [part for part in parts if isinstance(part, dict | list)]
        # Of a list one is enough, and what is no schema to look into ends by itself.
        is_open = 0 < len(open_parts) == len(node)
        needs[id(node)] = int(is_open) if isinstance(node, list) else len(open_parts)
        for part in open_parts:
            needed_by[id(part)].append(id(node))
    ended = [node for node, count in needs.items() if count == 0]
    while ended:
        for user in needed_by[ended.pop()]:
            needs[user] -= 1
            if needs[user] == 0:
                ended.append(user)
    references = (node["$ref"] for node in nodes if isinstance(node, dict) and "$ref" in node)
    return next((ref for ref in references if needs.get(id(_target(ref, root)), 0) > 0), None)


def _nodes(root: _Node) -> Iterator[_Node]:
    """Not by recursion: a body may nest deeply."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        inner = node if isinstance(node, list) else node.values()
        left += [value for value in inner if isinstance(value, dict | list)]


def _needed(node: dict[str, Any], root: dict[str, Any]) -> list[Any]:
    parts = [_target(node.get("$ref"), root)]
    if isinstance(all_of := node.get("allOf"), list):
        parts += all_of
    return parts + [choice for key in ("anyOf", "oneOf") if isinstance(choice := node.get(key), list)]


def _target(reference: object, root: dict[str, Any]) -> dict[str, Any] | None:
    """None for one that leads out of the schema, or nowhere: that is told by whoever has to follow it."""
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
