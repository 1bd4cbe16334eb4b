"""What do a model's files say of it? Config and weight sizes, from a folder or from the Hugging Face hub.

Nothing is downloaded but config.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from backends import tiny
from backends.embedding import bundled
from controlplane.config import ConfigError
from controlplane.service.plan import ModelFacts


def facts_of(name: str) -> ModelFacts:
    """Raises ConfigError naming what is missing."""
    try:
        path = Path(bundled.resolve(name) if name == bundled.MINILM else tiny.resolve(name))
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"models: {error}") from error
    return _in_folder(path) if path.is_dir() else _on_hub(name)


def _in_folder(folder: Path) -> ModelFacts:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json; give a folder as save_pretrained writes it")
    weights = _sizes(folder.glob("*.safetensors")) or _sizes(folder.glob("pytorch_model*.bin"))
    return ModelFacts(json.loads(path.read_text(encoding="utf-8")), weights)


def _sizes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _on_hub(name: str) -> ModelFacts:
    remedy = "give a local folder, or check the name and the network"
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"model {name!r} is no folder here; install an engine extra to read the hub"
        ) from error
    try:
        path = hf_hub_download(name, "config.json")
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except (OSError, HFValidationError) as error:
        raise ConfigError(
            f"model {name!r}: neither a folder here nor readable on the hub; {remedy}"
        ) from error
    sizes = {file.rfilename: file.size or 0 for file in files if "/" not in file.rfilename}
    weights = sum(size for file, size in sizes.items() if file.endswith(".safetensors")) or sum(
        size for file, size in sizes.items() if file.startswith("pytorch_model") and file.endswith(".bin")
    )
    return ModelFacts(json.loads(Path(path).read_text(encoding="utf-8")), weights)
