"""What may be changed while the service runs? Single keys of `admission` and `scheduling`; the rest is built.

A change is checked like the file, as a whole, and refused as a whole.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from controlplane.config.fields import ConfigError
from controlplane.config.loader import parse
from controlplane.config.root import Config

CHANGEABLE = ("admission", "scheduling")


def changeable(config: Config) -> dict[str, dict[str, Any]]:
    """The present values, as `changed` takes them."""
    return {name: asdict(getattr(config, name)) for name in CHANGEABLE}


def changed(config: Config, content: object) -> Config:
    """`content` holds the keys that differ; those of `scheduling.engine` are merged. Raises ConfigError."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"change: a mapping of {' and '.join(CHANGEABLE)} is needed")
    if fixed := sorted(set(content) - set(CHANGEABLE)):
        raise ConfigError(
            f"change: {fixed[0]}: not changeable while the service runs; change the file and restart. "
            f"Changeable are {', '.join(CHANGEABLE)}"
        )
    sections = {field.name: getattr(config, field.name) for field in fields(config)}
    found = parse({**sections, **_merged(changeable(config), content)}, source="change")
    for path, was, now in (
        ("admission.length_predictor", config.admission.length_predictor, found.admission.length_predictor),
        ("scheduling.engine", config.scheduling.engine is not None, found.scheduling.engine is not None),
    ):
        if was != now:
            raise ConfigError(f"change: {path}: not changeable while the service runs; restart with it")
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
