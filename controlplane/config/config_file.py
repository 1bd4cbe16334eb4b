"""The configuration file of a running server, read again with the options of the command line."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from controlplane.config.fields import ConfigError
from controlplane.config.loader import load
from controlplane.config.root import Config


def overridden(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values of these keys of `server`. Raises ConfigError."""
    try:
        return replace(config, server=replace(config.server, **keys))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"command line: {fault['msg'].removeprefix('Value error, ')}") from None


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file and the keys of `server` that the command line overrides.

    The path is opened anew each time, so that a symbolic link may be replaced, as Kubernetes does with a
    ConfigMap.
    """

    path: Path
    overrides: Mapping[str, Any]

    def load(self) -> Config:
        """The configuration that the file states now. Raises ConfigError."""
        return overridden(load(self.path), self.overrides)

    def digest(self) -> str:
        """SHA-256 (hex) of the content. Raises ConfigError if the file cannot be read."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}; the file is needed to reload it") from error
