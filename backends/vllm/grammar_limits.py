"""Bounds of the grammars that constrain outputs, checked on their text before anything is compiled."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from controlplane.core.errors import Refused

CODE = "grammar_too_complex"
"""Code of the error for a grammar beyond a limit."""

# Keys of a schema that repeat a part of the output. Other keys of these names, such as a property, have no
# number as their value.
_REPETITIONS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
     "maxContains")
)  # fmt: skip
_PROPERTIES = ("properties", "patternProperties")
_ALTERNATIVES = ("enum", "anyOf", "oneOf")
# An escaped character is matched first, because `\{9}` repeats nothing and `\\{9}` a backslash.
_REPEATED = re.compile(r"\\.|\{(\d*)(?:,(\d*))?\}", re.DOTALL)
_NAMES = {
    "json": ("the JSON schema", "response_format"),
    "regex": ("the regular expression", "structured_outputs.regex"),
    "choice": ("the list of choices", "structured_outputs.choice"),
    "grammar": ("the grammar", "structured_outputs.grammar"),
    "structural_tag": ("the grammar of the tools", "tools"),
}
KINDS = tuple(_NAMES)
"""Fields of vLLM's StructuredOutputsParams that hold a grammar; `json_object` is always the same one."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of one grammar; the fields are keys of `server.limits`. With `grammar_ms` 0 none is compiled."""

    max_grammar: int
    max_schema: int
    max_grammar_properties: int
    max_grammar_choices: int
    max_grammar_repeat: int
    grammar_ms: int
    grammar_step_ms: int
    grammar_memory: int


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar in the terms of vLLM's StructuredOutputsParams: its `kind` is the field that holds it.

    `is_of_tools`: it was made from the tools that the model must call.
    """

    kind: str
    value: Any
    is_of_tools: bool = False

    @property
    def name(self) -> str:
        """Name of the grammar in errors."""
        return "the grammar of the tools" if self.is_of_tools else _NAMES[self.kind][0]

    @property
    def param(self) -> str:
        """The field of the request body."""
        return "tools" if self.is_of_tools else _NAMES[self.kind][1]

    def refused(self, cause: str, key: str, limit: str, remedy: str = "simplify it") -> Refused:
        """The error for this grammar where it exceeds the limit `key`."""
        return Refused(
            f"{self.name} {cause}, and server.limits.{key} is {limit}; {remedy} or raise the limit",
            param=self.param,
            code=CODE,
        )

    @property
    def _is_schema(self) -> bool:
        return self.kind in ("json", "structural_tag")

    def check_size(self, limits: GrammarLimits) -> None:
        """Raises Refused for too many choices or bytes, which costs little whatever their number."""
        value = self.value
        if isinstance(value, list):
            self._check_count("max_grammar_choices", "choices", len(value), limits)
        size = len((value if isinstance(value, str) else json.dumps(value)).encode(errors="replace"))
        key = "max_schema" if self._is_schema else "max_grammar"
        if size > (most := getattr(limits, key)):
            raise self.refused(f"has {size:,} bytes", key, f"{most:,}", "shorten it")

    def check_content(self, limits: GrammarLimits) -> None:
        """Raises Refused for the first limit that a part exceeds, or a schema that is not JSON."""
        if self.kind == "regex":
            self._check_pattern(self.value, limits)
        if self._is_schema:
            self._check_schema(self._parsed() if isinstance(self.value, str) else self.value, limits)

    def _parsed(self) -> object:
        try:
            return orjson.loads(self.value)
        except orjson.JSONDecodeError as error:
            raise Refused(f"{self.name} is not valid JSON: {error}; correct it", param=self.param) from None

    def _check_schema(self, schema: object, limits: GrammarLimits) -> None:
        for node in _objects(schema):
            for key in _PROPERTIES:
                if isinstance(found := node.get(key), dict):
                    name = "properties in one object"
                    self._check_count("max_grammar_properties", name, len(found), limits)
            for key in _ALTERNATIVES:
                if isinstance(found := node.get(key), list):
                    self._check_count("max_grammar_choices", f"values of one {key}", len(found), limits)
            for key in node.keys() & _REPETITIONS:
                # JSON allows 1e6 for an integer.
                if isinstance(found := node[key], int | float):
                    self._check_repeat(f"{key}={found:,}", found, limits)
            if isinstance(named := node.get("patternProperties"), dict):
                for pattern in named:
                    self._check_pattern(pattern, limits)
            if isinstance(pattern := node.get("pattern"), str):
                self._check_pattern(pattern, limits)

    def _check_pattern(self, pattern: str, limits: GrammarLimits) -> None:
        for found in _REPEATED.finditer(pattern):
            # Ten digits are more than any limit, and an integer of thousands is costly.
            most = max((int(digits[:10]) for digits in found.groups() if digits), default=0)
            self._check_repeat(f"the repetition {found[0][:24]}", most, limits)

    def _check_count(self, key: str, name: str, found: int, limits: GrammarLimits) -> None:
        most: int = getattr(limits, key)
        if found > most:
            raise self.refused(f"has {found:,} {name}", key, f"{most:,}", "use fewer")

    def _check_repeat(self, name: str, found: float, limits: GrammarLimits) -> None:
        if found > limits.max_grammar_repeat:
            most = f"{limits.max_grammar_repeat:,}"
            raise self.refused(f"has {name}", "max_grammar_repeat", most, "lower it, leave it out")


def _objects(schema: object) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value. Iterative; the API bounds the number of values."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node
