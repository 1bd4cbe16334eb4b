"""What do a model's files say of it? Config and weight sizes, from a folder or from the Hugging Face hub.

Nothing is downloaded but config.json. Where the hub is out of reach, what it gave earlier counts, as it does
to the engines.
"""

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from controlplane.config import ConfigError
from controlplane.service.memory.memory_plan import ModelFacts

# An engine loads the first of these that there are; some models come in more than one form.
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")


def model_facts(name: str, resolve: Callable[[str], str]) -> ModelFacts:
    """`resolve` gives the folder of a bundled model, any other name as it is. Raises ConfigError."""
    try:
        path = Path(resolve(name))
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"models: {error}") from error
    return _in_folder(path) if path.is_dir() else _on_hub(name)


def _in_folder(folder: Path) -> ModelFacts:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json; give a folder as save_pretrained writes it")
    return ModelFacts(_config(path), _weight_bytes(_sizes(folder)))


def _on_hub(name: str) -> ModelFacts:
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"model {name!r} is no folder here; install an engine extra to read the hub"
        ) from error
    try:
        path = Path(hf_hub_download(name, "config.json"))
    except (OSError, HFValidationError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"model {name!r}: neither a folder here nor readable on the hub; give a local folder, or check "
            f"the name, the network and your right to read it (HF_TOKEN). The hub's client says: {cause}"
        ) from error
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
        weights = _weight_bytes({file.rfilename: file.size or 0 for file in files})
    # A lost connection is an error of the library below, which changes with the client's release.
    except (OSError, *HfHubHTTPError.__bases__):  # type: ignore[misc]
        weights = _weight_bytes(_sizes(path.parent))
    if not weights:
        raise ConfigError(
            f"model {name!r}: the hub is out of reach, and of its weights nothing was downloaded earlier; "
            f"run `hf download {name}` where there is a network, or give a local folder"
        )
    return ModelFacts(_config(path), weights)


def _config(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}; fetch the model anew") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is needed; fetch the model anew")
    return content


def _sizes(folder: Path) -> Mapping[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _weight_bytes(sizes: Mapping[str, int]) -> int:
    """Of the model's own folder, by name; those that lie deeper are other forms of it."""
    for pattern in _WEIGHTS:
        if found := [size for name, size in sizes.items() if "/" not in name and fnmatch(name, pattern)]:
            return sum(found)
    return 0
