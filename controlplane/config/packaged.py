"""Finds the configurations that ship with the package, so that `tandem serve dev` works from any folder."""

from pathlib import Path

import controlplane
from controlplane.config.fields import ConfigError

# The wheel contains the files inside the package; in a checkout they are in its parent folder.
_FOLDERS = (
    Path(controlplane.__file__).parent / "configs",
    Path(controlplane.__file__).parents[1] / "configs",
)


def packaged_configs() -> dict[str, Path]:
    """Path of each configuration that ships with the package, by its name."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def config_path(given: Path) -> Path:
    """`given` if it exists or looks like a path, else the packaged configuration of that name.

    Raises:
        ConfigError: `given` is a bare name, and neither a file nor a packaged configuration has it.
    """
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    known = packaged_configs()
    if given.name not in known:
        names = ", ".join(known) or "none"
        raise ConfigError(
            f"{given}: neither a file nor a packaged configuration (packaged: {names}); "
            "give the path of a YAML file or one of these names"
        )
    return known[given.name]
