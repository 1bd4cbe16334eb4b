"""Compares a configuration with the one in force, and finds the one that a running server can have of it.

Keys of `live_keys.LIVE` take their new values; the others keep those in force and are reported as needing a
restart. The result is validated like a file; if one key is invalid, nothing changes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from controlplane.config.documents import (
    Document,
    document_of,
    flattened,
    is_whole,
    masked,
    merged,
    overridden,
    require_bounded,
    unmasked,
)
from controlplane.config.fields import ConfigError
from controlplane.config.live_keys import RESTART, WORKERS, entry_of
from controlplane.config.loader import parse
from controlplane.config.root import Config

_ENGINE = "scheduling.engine"
_FREE = (f"{_ENGINE}.", "scheduling.options.")


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The values of one key before and after a change, secrets masked; None where the key is absent."""

    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What a running server takes of a wanted configuration.

    `config` is the configuration then in force. `unchanged` are the keys that were stated and have that
    value.
    """

    config: Config
    applied: Mapping[str, KeyChange]
    needs_restart: Mapping[str, KeyChange]
    unchanged: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The plan key by key."""
        return {
            "applied": {key: {"from": each.before, "to": each.after} for key, each in self.applied.items()},
            "needs_restart": {
                key: {"from": each.before, "to": each.after, "reason": restart_reason(key)}
                for key, each in self.needs_restart.items()
            },
            "unchanged": list(self.unchanged),
        }


def wanted_config(
    config: Config,
    content: object,
    *,
    source: str = "change",
    overrides: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Config, Document]:
    """The configuration that `content` asks for, and the content with its secrets and overrides.

    A mapping with `models` is a whole configuration: what it leaves out has its default, and its keys of
    `server` have the values of `overrides`. Any other is a part, merged key by key into `config`. The keys of
    `server` in `fixed` have these values in both. Raises ConfigError.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source}: should be a mapping, a whole configuration or a part of one; send one")
    require_bounded(content, source=source)
    present = document_of(config)
    stated: Document = unmasked(content, present)
    if not is_whole(stated):
        return parse(overridden(merged(present, stated), fixed or {}), source=source), stated
    whole = overridden(stated, {**(overrides or {}), **(fixed or {})})
    return parse(whole, source=source), whole


def plan_change(
    config: Config,
    wanted: Config,
    *,
    quotas_move: bool,
    replaces_workers: bool,
    stated: Document | None = None,
) -> ChangePlan:
    """What a server with `config` in force takes of `wanted`; `stated` are the keys to report.

    With `replaces_workers` embedding models and rerankers are live, but the first and the last of them.
    Raises ConfigError if the keys that need no restart are not valid with the present values of the others.
    """
    before, after = dict(flattened(document_of(config))), dict(flattened(document_of(wanted)))
    applied: dict[str, KeyChange] = {}
    waiting: dict[str, KeyChange] = {}
    possible = document_of(wanted)
    keeps_workers = not replaces_workers or not (config.models.encoders and wanted.models.encoders)
    for path in _kept_sections(config, wanted, quotas_move=quotas_move, keeps_workers=keeps_workers):
        _copy(document_of(config), possible, path)
    result = parse(possible, source="change, without what needs a restart")
    reached = dict(flattened(document_of(result)))
    for path in sorted(before.keys() | after.keys() | reached.keys()):
        was, wants, gets = before.get(path), after.get(path), reached.get(path)
        key = path.rpartition(".")[2]
        # In other sections a key that is absent is one without a value.
        is_free = path.startswith(_FREE)
        if was != gets or (is_free and (path in before) != (path in reached)):
            applied[path] = KeyChange(masked(was, key), masked(gets, key))
        if wants != gets:
            waiting[path] = KeyChange(masked(gets, key), masked(wants, key))
    said = () if stated is None else (path for path, _ in flattened(stated))
    unchanged = tuple(sorted(path for path in said if path not in applied and path not in waiting))
    return ChangePlan(result, applied, waiting, unchanged)


def restart_reason(path: str) -> str:
    """Why a change of the key needs a restart."""
    if path.startswith(_ENGINE):
        return "the engine is started with its scheduler"
    entry = entry_of(path)
    if entry in WORKERS:
        return "without any worker, or with the first one, the memory is divided otherwise"
    return RESTART.get(entry, "the engines were started with static quotas")


def restart_digest(config: Config) -> str:
    """SHA-256 (hex) of what a running server does not take: with another one it has to be started again."""
    document = document_of(config)
    kept: Document = {}
    for path in (*RESTART, *(["quota"] if config.static_quota_reason() is not None else [])):
        kept[path] = reduce(getitem, path.split("."), document)
    kept[_ENGINE] = config.scheduling.engine is None
    kept["models"] = bool(config.models.encoders)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _kept_sections(
    config: Config, wanted: Config, *, quotas_move: bool, keeps_workers: bool
) -> Iterator[str]:
    """The paths whose values a running server keeps."""
    yield from RESTART
    if keeps_workers:
        yield from WORKERS
    if (config.scheduling.engine is None) != (wanted.scheduling.engine is None):
        yield _ENGINE
    if not quotas_move:
        yield "quota"


def _copy(source: Document, target: Document, path: str) -> None:
    """Gives `target` the value that `source` has at `path`, a key that both have."""
    *parents, key = path.split(".")
    for name in parents:
        source, target = source[name], target[name]
    target[key] = source[key]
