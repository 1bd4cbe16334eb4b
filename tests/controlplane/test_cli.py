import sys

import pytest

from controlplane.cli import main


@pytest.mark.parametrize(
    ("models", "package", "extra"),
    [
        ("{chat: {model: m}}", "vllm", "vllm"),
        ("{embeddings: [{model: m}]}", "sentence_transformers", "embeddings"),
    ],
)
def test_serve_names_the_extra_that_is_missing(tmp_path, monkeypatch, capsys, models, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    file = tmp_path / "my.yaml"
    file.write_text(f"models: {models}\n", encoding="utf-8")
    assert main(["serve", str(file)]) == 2
    assert f"the package {package} is not installed; install the extra {extra}" in capsys.readouterr().err
