"""Writes a configuration as YAML with the meaning of each key, which is that of docs/configuration.md.

A key is explained where it occurs first. A choice may have a reason of its own, which follows its meaning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from textwrap import wrap
from typing import Any, get_origin

import yaml

from controlplane.config.loader import section_in
from controlplane.config.reference_pages import descriptions
from controlplane.config.root import Config

_WIDTH = 108


def commented_yaml(content: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """YAML text of `content`, a valid configuration; `reasons` are by dotted path, without list indices."""
    return "\n".join(_mapping(content, Config, "", "", reasons, set())) + "\n"


def _mapping(
    content: Mapping[str, Any],
    section: Any,
    path: str,
    indent: str,
    reasons: Mapping[str, str],
    explained: set[str],
) -> Iterator[str]:
    """Lines of a mapping. `section` is None where the keys are not Tandem's, as in engine arguments."""
    texts = {} if section is None else descriptions(section)
    for key, value in content.items():
        here = f"{path}.{key}".lstrip(".")
        if not indent:
            yield ""
        meaning = texts.get(key, "").replace("`", "")
        for text in (meaning if meaning not in explained else "", reasons.get(here, "")):
            yield from (f"{indent}# {line}" for line in wrap(text, _WIDTH - len(indent)))
        explained.add(meaning)
        kind = next((f.type for f in fields(section) if f.name == key), None) if section is not None else None
        inner = section_in(kind)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            if inner is not None and get_origin(kind) is Mapping:
                for name, entry in value.items():
                    yield from _named(name, entry, inner, here, indent + "  ", reasons, explained)
            else:
                yield from _mapping(value, inner, here, indent + "  ", reasons, explained)
        elif inner is not None and isinstance(value, Sequence) and not isinstance(value, str):
            yield f"{indent}{key}:"
            for item in value:
                lines = list(_mapping(item, inner, here, indent + "    ", reasons, explained))
                first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
                yield from lines[:first]
                yield f"{indent}  - {lines[first].lstrip()}"
                yield from lines[first + 1 :]
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _named(
    name: str,
    entry: Mapping[str, Any],
    section: Any,
    path: str,
    indent: str,
    reasons: Mapping[str, str],
    explained: set[str],
) -> Iterator[str]:
    here = f"{path}.{name}"
    yield from (f"{indent}# {line}" for line in wrap(reasons.get(here, ""), _WIDTH - len(indent)))
    yield f"{indent}{name}:"
    yield from _mapping(entry, section, here, indent + "  ", reasons, explained)


def _scalar(value: object) -> str:
    # Short values only: a document end marker follows plain scalars.
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
