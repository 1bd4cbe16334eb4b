"""Configuration: one YAML file, parsed into frozen dataclasses, with one module per section.

An error names the path in the file, the value, the rule and the remedy. Unknown keys are rejected, so that a
typing error never becomes a silent default. `reference_pages` generates docs/configuration.md.
"""

from controlplane.config.fields import ConfigError
from controlplane.config.loader import load, parse
from controlplane.config.root import Config

__all__ = ["Config", "ConfigError", "load", "parse"]
