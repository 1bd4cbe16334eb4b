"""One name needs no network; the others are left as they are."""

import json
from pathlib import Path

from backends.bundled_models import MINILM, resolve


def test_the_bundled_name_is_a_folder_with_the_model():
    config = json.loads((Path(resolve(MINILM)) / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("bert", 384)


def test_other_names_pass_through():
    assert resolve("BAAI/bge-m3") == "BAAI/bge-m3"
