"""Reads a model's config.json and the sizes of its weight files, from a folder or the Hugging Face hub.

Only config.json is downloaded. If the hub is unreachable, its local cache is used, as the engines do.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from controlplane.config import ConfigError
from controlplane.service.memory.memory_plan import ModelFacts

# An engine loads the first pattern that matches; some repositories hold the weights in several formats.
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")


def model_facts(name: str) -> ModelFacts:
    """Config and weight sizes of a folder, or of a model on the hub.

    Raises ConfigError naming what is missing.
    """
    path = Path(name)
    return _in_folder(path) if path.is_dir() else _on_hub(name)


def _in_folder(folder: Path) -> ModelFacts:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json; name a folder that save_pretrained wrote")
    return ModelFacts(_config(path), _weight_bytes(_sizes(folder)))


def _on_hub(name: str) -> ModelFacts:
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"model {name!r}: no such folder; install an engine extra to read it from the hub"
        ) from error
    try:
        path = Path(hf_hub_download(name, "config.json"))
    except (OSError, HFValidationError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"model {name!r}: neither a local folder nor readable on the hub; name a local folder, or check "
            f"the name, the network and the access token (HF_TOKEN). The hub's client reports: {cause}"
        ) from error
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
        weights = _weight_bytes({file.rfilename: file.size or 0 for file in files})
    # The base classes include the HTTP library's errors, which differ between releases of the client.
    except (OSError, *HfHubHTTPError.__bases__):  # type: ignore[misc]
        weights = _weight_bytes(_sizes(path.parent))
    if not weights:
        raise ConfigError(
            f"model {name!r}: the hub is unreachable and the local cache holds no weights; run "
            f"`hf download {name}` with a network, or name a local folder"
        )
    return ModelFacts(_config(path), weights)


def _config(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object; download the model again")
    return content


def _sizes(folder: Path) -> Mapping[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _weight_bytes(sizes: Mapping[str, int]) -> int:
    """Total size of the weight files in the top folder; sub-folders hold other formats of the model."""
    for pattern in _WEIGHTS:
        if found := [size for name, size in sizes.items() if "/" not in name and fnmatch(name, pattern)]:
            return sum(found)
    return 0
