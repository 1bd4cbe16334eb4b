"""Writes a configuration out as a document of plain values; merges, flattens and masks documents.

A path joins keys and list indices by dots: `classes.batch.ttft_ms`, `models.embeddings.0.batch_tokens`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from controlplane.config.fields import ConfigError
from controlplane.config.root import Config

Document = dict[str, Any]
"""A mapping of JSON values."""

MASK = "***"
"""Shown in place of a secret; in a list with the position of the item, from 1.

Sent back, it keeps the secret.
"""
# Engine arguments and options of plug-ins may hold keys of other services; `batch_tokens` is a number.
_SECRET = re.compile(r"(sha256|passw(or)?d|secret|token|key|credential)s?$", re.IGNORECASE)
_CONFIG: TypeAdapter[Config] = TypeAdapter(Config)
# Mappings whose entries have free names; null removes an entry.
_OPEN = ("classes", "tenants", "scheduling.engine", "scheduling.options")
_MAX_VALUES = 100_000


def document_of(config: Config) -> Document:
    """The whole configuration with its defaults, secrets included; `parse` reads it back."""
    found: Document = _CONFIG.dump_python(config, mode="json")
    if config.scheduling.engine is None:
        found["scheduling"]["engine"] = "off"
    if config.models.chat is not None and config.models.chat.restart is None:
        found["models"]["chat"]["restart"] = "never"
    return found


def digest_of(config: Config) -> str:
    """SHA-256 (hex) of the whole configuration."""
    text = json.dumps(document_of(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_whole(content: Mapping[Any, Any]) -> bool:
    """Whether the content is a whole configuration and not a part: `models` is its only required section."""
    return "models" in content


def merged(present: Document, changes: Mapping[Any, Any], path: str = "") -> Document:
    """`present` with the values of `changes`, merged key by key; null removes an entry of an open mapping."""
    found = dict(present)
    for key, value in changes.items():
        here = f"{path}.{key}".lstrip(".")
        if value is None and path in _OPEN:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(present.get(key), Mapping):
            found[key] = merged(present[key], value, here)
        else:
            found[key] = value
    return found


def overridden(content: Any, keys: Mapping[str, Any]) -> Any:
    """The content of a configuration file with other values of these keys of `server`.

    They are merged before the content is parsed: `server.host` may be valid only with another `server.open`.
    """
    if not (isinstance(content, Mapping) and isinstance(content.get("server", {}), Mapping)):
        # `parse` says what is wrong with it.
        return content
    return {**content, "server": {**content.get("server", {}), **keys}}


def flattened(document: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its path; a list of plain values is one value."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from flattened(value, f"{path}.{key}".lstrip("."))
    elif isinstance(document, list) and any(isinstance(item, Mapping) for item in document):
        for index, item in enumerate(document):
            yield from flattened(item, f"{path}.{index}")
    else:
        yield path, document


def masked(value: Any, key: str = "") -> Any:
    """The value at `key` with secrets replaced by MASK."""
    if isinstance(value, Mapping):
        return {name: masked(item, name) for name, item in value.items()}
    is_secret = _SECRET.search(key) is not None
    if isinstance(value, list):
        return [f"{MASK}{at}" if is_secret else masked(item) for at, item in enumerate(value, 1)]
    return MASK if is_secret and isinstance(value, str) else value


def unmasked(content: Any, present: Any, path: str = "") -> Any:
    """`content` with each mask replaced by the secret that `present` has there. Raises ConfigError."""
    key = path.rpartition(".")[2]
    if isinstance(content, Mapping):
        known = present if isinstance(present, Mapping) else {}
        return {
            name: unmasked(value, known.get(name), f"{path}.{name}".lstrip("."))
            for name, value in content.items()
        }
    if isinstance(content, list | tuple) and isinstance(present, list):
        if _SECRET.search(key):
            return [_secret(item, present, path) for item in content]
        return [
            unmasked(item, _counterpart(item, at, present), f"{path}.{at}") for at, item in enumerate(content)
        ]
    if content == MASK and _SECRET.search(key):
        if not isinstance(present, str):
            raise ConfigError(f"{path}={MASK!r}: stands for a secret that is set, and none is; state it")
        return present
    return content


def _counterpart(item: object, at: int, present: Sequence[Any]) -> object:
    """The item that a list item was read from: the model of its name, else the one at its position."""
    if isinstance(item, Mapping) and "model" in item:
        name = item.get("name") or item["model"]
        return next((each for each in present if name == (each.get("name") or each["model"])), None)
    return present[at] if at < len(present) else None


def _secret(item: object, present: Sequence[Any], path: str) -> object:
    if not isinstance(item, str) or not item.startswith(MASK):
        return item
    position = item.removeprefix(MASK)
    if not re.fullmatch(r"[1-9]\d{0,5}", position) or int(position) > len(present):
        raise ConfigError(
            f"{path}={item!r}: stands for a secret of the present list, which has {len(present)}; state it"
        )
    return present[int(position) - 1]


def require_bounded(content: object, *, source: str) -> None:
    """Raises ConfigError if the content has too many values, as a YAML file of a few aliases may."""
    left, seen = [content], 0
    while left:
        here = left.pop()
        seen += 1
        if seen > _MAX_VALUES:
            raise ConfigError(
                f"{source}: more than {_MAX_VALUES:,} values, each use of an alias counted; shorten it"
            )
        if isinstance(here, Mapping):
            left += here.values()
        elif isinstance(here, list | tuple):
            left += here
