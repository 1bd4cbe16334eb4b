"""Changes keys of `admission` and `scheduling` at run time; other sections need a restart.

A change is validated like the file; if one key is invalid, nothing changes.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from controlplane.config.fields import ConfigError
from controlplane.config.loader import parse
from controlplane.config.root import Config

CHANGEABLE = ("admission", "scheduling")


def changeable(config: Config) -> dict[str, dict[str, Any]]:
    """The current values of the sections that may change, in the form that `changed` takes."""
    found = {name: asdict(getattr(config, name)) for name in CHANGEABLE}
    if config.scheduling.engine is None:
        found["scheduling"]["engine"] = "off"
    return found


def changed(config: Config, content: object) -> Config:
    """Returns `config` with the keys of `content` replaced.

    Mappings are merged key by key, `scheduling.engine` included. Raises ConfigError.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"change: should be a mapping with {' or '.join(CHANGEABLE)}; send one")
    if fixed := sorted(set(content) - set(CHANGEABLE)):
        raise ConfigError(
            f"change: {fixed[0]}: cannot change at run time; change the file and restart. "
            f"Only {' and '.join(CHANGEABLE)} can change"
        )
    sections = {field.name: getattr(config, field.name) for field in fields(config)}
    found = parse({**sections, **_merged(changeable(config), content)}, source="change")
    for path, was, now in (
        ("admission.length_predictor", config.admission.length_predictor, found.admission.length_predictor),
        ("scheduling.engine", config.scheduling.engine is not None, found.scheduling.engine is not None),
    ):
        if was != now:
            raise ConfigError(f"change: {path}: cannot change at run time; change the file and restart")
    return found


def _merged(present: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **present,
        **{
            key: _merged(present[key], value)
            if isinstance(value, Mapping) and isinstance(present.get(key), Mapping)
            else value
            for key, value in changes.items()
        },
    }
