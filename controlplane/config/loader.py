"""Is this file what it should be? YAML parsed once into sections; every mistake is told with its path.

What holds for the server's configuration holds for any other file of sections: the root is named.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from controlplane.config.fields import ConfigError
from controlplane.config.root import Config

Root = TypeVar("Root")

RENAMED = {
    "admission.keeps_pace": "admission.tpot_guard",
    "admission.lengths": "admission.length_predictor",
    "models.embeddings.yields_cpu": "models.embeddings.idle_cpu_priority",
    "pool.device_memory": "pool.kv_allocator",
    "predictors.remember": "predictors.max_examples",
    "quota.compare": "quota.urgency_aggregation",
    "quota.forecast.level": "quota.forecast.quantile",
    "quota.resting_weight": "quota.nominal_weight",
    "scheduling.patience_ms": "scheduling.default_deadline_ms",
    "scheduling.engine.decode_pace": "scheduling.engine.decode_pacing",
    "scheduling.engine.patience_ms": "scheduling.engine.default_deadline_ms",
    "scheduling.engine.prompt_price": "scheduling.engine.prefill_weight",
    "scheduling.engine.size_cut_share": "scheduling.engine.size_cutoff_share",
    "scheduling.engine.size_cut_window": "scheduling.engine.size_cutoff_window",
}
"""Keys of earlier versions and their present names, as dotted paths without list indices."""

_shown = Repr()
_shown.maxlevel = 2
_shown.maxstring = _shown.maxother = _shown.maxlong = 120
_SHAPES = {
    "tuple_type": "a list is needed: [a, b], or each on a line that begins with a dash",
    "dict_type": "a mapping is needed: {name: value}, or each on a line of its own",
}


def load(path: Path) -> Config:
    """Raises ConfigError."""
    return parse(read_yaml(path), source=str(path))


def parse(content: object, *, source: str = "config") -> Config:
    """Raises ConfigError. `content` is what the YAML file holds."""
    return parse_as(Config, content, source=source)


def read_yaml(path: Path) -> object:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    try:
        return yaml.load(text, Loader=_CarefulLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: lists and mappings lie too deep inside each other") from None


def parse_as(root: type[Root], content: object, *, source: str) -> Root:
    """`root` is a section. Raises ConfigError."""
    if lines := [f"{source}: {line}" for line in _renamed(content)]:
        raise ConfigError("\n".join(lines))
    try:
        return TypeAdapter(root).validate_python(content)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in _explained(root, error)]
        raise ConfigError("\n".join(lines)) from error


class _CarefulLoader(yaml.SafeLoader):
    """YAML lets a later key overwrite an earlier one in silence; here it is an error. And PyYAML raises what
    Python does of a value that only looks like a date (2001-13-45) or a number (0x_)."""

    # A copy: what vLLM imports for grammars makes PyYAML's own read dates as text.
    yaml_constructors: ClassVar[dict[Any, Any]] = dict(yaml.SafeLoader.yaml_constructors)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value!r} is no {kind}; to have it as text, put it in quotes",
                node.start_mark,
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # `<<` takes over another mapping's keys; those that stand here as well are meant to go before.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a plain name, and this is a list or a mapping", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _renamed(content: object) -> Iterator[str]:
    """One line for each key in RENAMED, at any depth: an experiment holds whole sections."""
    # Not by recursion: a file may nest deeply, and an alias may contain itself.
    left: list[tuple[str, str, object]] = [("", "", content)]
    seen: set[int] = set()
    while left:
        shown, keys, here = left.pop()
        if not isinstance(here, Mapping | list | tuple) or id(here) in seen:
            continue
        seen.add(id(here))
        if not isinstance(here, Mapping):
            left += [(f"{shown}.{index}", keys, item) for index, item in enumerate(here)]
            continue
        for key, value in here.items():
            path = f"{keys}.{key}"
            if new := next((new for old, new in RENAMED.items() if path.endswith(f".{old}")), None):
                yield f"{f'{shown}.{key}'[1:]}: renamed to {new.rpartition('.')[2]}; use {new}"
            left.append((f"{shown}.{key}", path, value))


def _explained(root: type, error: ValidationError) -> Iterator[str]:
    found = error.errors()
    for item in found:
        # A list whose items are wrong is also too short.
        if any(other["loc"][:-1] == item["loc"] != other["loc"] for other in found):
            continue
        # Pydantic names the branches of a union in the location; the file does not have them.
        path = ".".join(str(p) for p in item["loc"] if not re.search(r"[\[(]|^(int|literal)$", str(p)))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield f"{path}: unknown key; {_near(root, path)}"
        elif item["type"] == "missing":
            yield f"{path}: missing; it must be given"
        elif path:
            message = _rule(root, path, item)
            # Who gives a key in the place of its hash does not want to read it in a log.
            is_hidden = isinstance(item["input"], dict) or "=" in message or "sha256" in path
            yield f"{path}{'' if is_hidden else '=' + _shown.repr(item['input'])}: {message}"
        else:
            yield _rule(root, path, item)


def _rule(root: type, path: str, item: ErrorDetails) -> str:
    if item["type"] != "dataclass_type":
        told = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be", 1)
        return _SHAPES.get(item["type"], told)
    known = ", ".join(_keys_at(root, path.split(".")))
    return f"a mapping is needed, with keys of {known}; give some, or leave it out where it is optional"


def _near(root: type, path: str) -> str:
    *parents, key = path.split(".")
    known = _keys_at(root, parents)
    guess = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    return f"{hint}known here: {', '.join(known)}"


def _keys_at(root: type, path: list[str]) -> list[str]:
    """Keys of the section that `path` leads to; list indices and names of map entries are passed over."""
    here: Any = root
    for step in path:
        stated = {f.name: f.type for f in fields(here)}
        if step in stated:
            here = section_in(stated[step])
            if here is None:
                return []
    return [f.name for f in fields(here)]


def section_in(kind: Any) -> Any:
    """The section in an annotation: itself, an optional one's, or a container's element's."""
    if is_dataclass(kind):
        return kind
    return next((found for part in get_args(kind) if (found := section_in(part))), None)
