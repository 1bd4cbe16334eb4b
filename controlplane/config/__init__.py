"""What does the operator want? One YAML file, parsed once into frozen dataclasses, a module a section.

Every error names the path in the file, the value, the rule and the remedy. Nothing unknown is accepted,
so a typing error never becomes a silent default.
"""

from controlplane.config.fields import ConfigError
from controlplane.config.loader import load, parse
from controlplane.config.root import Config

__all__ = ["Config", "ConfigError", "load", "parse"]
