"""Loads a YAML file into configuration sections; errors name path, value, rule and remedy.

Any dataclass of sections can be the root: `Config`, or an experiment of the benchmark.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from controlplane.config.fields import ConfigError
from controlplane.config.renamed_keys import renamed_keys
from controlplane.config.root import Config
from controlplane.config.yaml_lines import line_of

Root = TypeVar("Root")

_shown = Repr()
_shown.maxlevel = 2
_shown.maxstring = _shown.maxother = _shown.maxlong = 120
_SHAPES = {
    "tuple_type": "should be a list: [a, b], or one item per line, each after a dash",
    "dict_type": "should be a mapping: {name: value}, or one entry per line",
}


def load(path: Path) -> Config:
    """Reads and parses a configuration file. Raises ConfigError, which names lines of the file."""
    text = read_text(path)
    return parse(yaml_content(text, source=str(path)), source=str(path), text=text)


def parse(content: object, *, source: str = "config", text: str | None = None) -> Config:
    """Parses the content of a YAML file. Raises ConfigError, whose lines begin with `source`.

    `text` is that of the content, so that errors can name its lines.
    """
    return parse_as(Config, content, source=source, text=text)


def read_yaml(path: Path) -> object:
    """Reads a YAML file. Raises ConfigError if it cannot be read or is not YAML."""
    return yaml_content(read_text(path), source=str(path))


def read_text(path: Path) -> str:
    """Reads a text file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def yaml_content(text: str, *, source: str) -> object:
    """The content of a YAML text. Raises ConfigError, whose lines begin with `source`."""
    try:
        # The class is a SafeLoader.
        return yaml.load(text, Loader=_CarefulLoader)  # nosec B506
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{source}: lists and mappings are nested too deeply; flatten them") from None


def parse_as(root: type[Root], content: object, *, source: str, text: str | None = None) -> Root:
    """Parses `content` into the dataclass `root`. Raises ConfigError, also for keys in RENAMED or REMOVED.

    `text` as for `parse`.
    """
    if lines := [f"{source}: {line}" for line in renamed_keys(content)]:
        raise ConfigError("\n".join(lines))
    try:
        return TypeAdapter(root).validate_python(content)
    except ValidationError as error:
        lines = [
            f"{source}{_line_name(text, path)}: {explained}" for path, explained in _explained(root, error)
        ]
        raise ConfigError("\n".join(lines)) from error


def _line_name(text: str | None, path: Sequence[str]) -> str:
    line = None if text is None else line_of(text, path)
    return "" if line is None else f", line {line}"


class _CarefulLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and values that only look like a date or a number.

    In plain YAML a later key silently overwrites an earlier one, and PyYAML raises a bare ValueError for
    2001-13-45 or 0x_.
    """

    # A copy: a dependency of vLLM changes PyYAML's own table so that dates stay text.
    yaml_constructors: ClassVar[dict[Any, Any]] = dict(yaml.SafeLoader.yaml_constructors)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value!r} is not a valid {kind}; for a text, put it in quotes",
                node.start_mark,
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # `<<` merges another mapping; keys that are stated here as well override it on purpose.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key should be a plain name, not a list or a mapping", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice; remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _explained(root: type, error: ValidationError) -> Iterator[tuple[Sequence[str], str]]:
    """Each mistake: the keys on the path to it, and the message."""
    found = error.errors()
    for item in found:
        # Pydantic also reports a list with an invalid item as too short.
        if any(other["loc"][:-1] == item["loc"] != other["loc"] for other in found):
            continue
        # Pydantic adds the branch of a union to the location; it is no key of the file.
        keys = [str(p) for p in item["loc"] if not re.search(r"[\[(]|^(int|literal)$", str(p))]
        path = ".".join(keys)
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield keys, f"{path}: unknown key; {_near(root, path)}"
        elif item["type"] == "missing":
            yield keys, f"{path}: missing; add it"
        elif path:
            message = _rule(root, path, item)
            # An API key given in place of its hash must not reach the log.
            is_hidden = isinstance(item["input"], dict) or "=" in message or "sha256" in path
            yield keys, f"{path}{'' if is_hidden else '=' + _shown.repr(item['input'])}: {message}"
        else:
            yield keys, _rule(root, path, item)


def _rule(root: type, path: str, item: ErrorDetails) -> str:
    if item["type"] != "dataclass_type":
        rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be", 1)
        return _SHAPES.get(item["type"], rule)
    known = ", ".join(_keys_at(root, path.split(".")))
    return f"should be a mapping with keys out of {known}; add some, or leave an optional section out"


def _near(root: type, path: str) -> str:
    *parents, key = path.split(".")
    known = _keys_at(root, parents)
    guess = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else "remove it; "
    return f"{hint}known keys: {', '.join(known)}"


def _keys_at(root: type, path: list[str]) -> list[str]:
    """Keys of the section at `path`; list indices and names of mapping entries are skipped."""
    here: Any = root
    for step in path:
        types = {f.name: f.type for f in fields(here)}
        if step in types:
            here = section_in(types[step])
            if here is None:
                return []
    return [f.name for f in fields(here)]


def section_in(kind: Any) -> Any:
    """The section in an annotation: itself, or that of an optional value or of a container's items."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind
    return next((found for part in get_args(kind) if (found := section_in(part))), None)
