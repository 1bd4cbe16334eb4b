"""The configuration file of a running server, read again with the options of the command line."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.config.documents import overridden
from controlplane.config.fields import ConfigError
from controlplane.config.loader import parse, read_text, yaml_content
from controlplane.config.root import Config


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file and the keys of `server` that the command line overrides.

    The path is opened anew each time, so that a symbolic link may be replaced, as Kubernetes does with a
    ConfigMap.
    """

    path: Path
    overrides: Mapping[str, Any]

    def load(self) -> Config:
        """The configuration that file and command line state now. Raises ConfigError."""
        options = ", ".join(f"--{key}" for key in self.overrides)
        source = f"{self.path} with {options}" if options else str(self.path)
        text = read_text(self.path)
        content = overridden(yaml_content(text, source=str(self.path)), self.overrides)
        # A mistake in what the command line states has no line in the file.
        return parse(content, source=source, text=None if self.overrides else text)

    def digest(self) -> str:
        """SHA-256 (hex) of the content. Raises ConfigError if the file cannot be read."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}; the file is needed to reload it") from error
