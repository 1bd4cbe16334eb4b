"""`resolve` maps the bundled MiniLM to its folder and leaves other names unchanged."""

import json
from pathlib import Path

from backends.bundled_models import MINILM, resolve


def test_resolve_returns_the_folder_of_bundled_minilm():
    config = json.loads((Path(resolve(MINILM)) / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("bert", 384)


def test_resolve_returns_other_names_unchanged():
    assert resolve("BAAI/bge-m3") == "BAAI/bge-m3"
