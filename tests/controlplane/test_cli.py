"""The commands check, serve and predictor."""

import json
import socket
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
    remedy = f"install the extra {extra}; in a clone: pip install '.[{extra}]'"
    assert f"the package {package} is not installed; {remedy}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "message"),
    [("{kv_cache_dtype: fp5}", "models.chat: KV cache dtype 'fp5': known are"), ("{dtype: }", "")],
)
def test_check_with_an_unknown_kv_cache_size(tmp_path, monkeypatch, capsys, engine, message):
    monkeypatch.setitem(sys.modules, "vllm", None)
    file = tmp_path / "my.yaml"
    chat = f"{{model: {model_in(tmp_path)}, engine: {engine}}}"
    file.write_text(f"models: {{chat: {chat}}}\npool: {{memory: 1GiB}}\n", encoding="utf-8")
    assert main(["check", str(file)]) == (2 if message else 0)
    assert message in capsys.readouterr().err


def model_in(folder):
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def test_check_without_vllm_skips_engine_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    model_in(tmp_path)
    file = tmp_path / "my.yaml"
    for engine, is_told in (("{max_modellen: 9}", True), ("{}", False)):
        chat = f"{{model: {tmp_path}, engine: {engine}}}"
        file.write_text(f"models: {{chat: {chat}}}\npool: {{memory: 1GiB}}\n", encoding="utf-8")
        assert main(["check", str(file)]) == 0
        message = capsys.readouterr().out
        assert "KV blocks" in message
        assert ("models.chat.engine: not validated, because vllm is not installed" in message) == is_told


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_invalid_port_is_named(capsys, port):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "any.yaml", f"--port={port}"])
    assert f"{port}: should be a number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(("log", "to"), [("no.jsonl", "lengths.npz"), ("log.jsonl", "no/lengths.npz")])
def test_missing_log_is_named(tmp_path, monkeypatch, capsys, log, to):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert main(["predictor", "train", log, "--to", to]) == 2
    missing = log if log.startswith("no") else to
    assert capsys.readouterr().err == f"{missing}: No such file or directory\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.1", "no-such-host.invalid", "x" * 64])
def test_unavailable_address_is_reported_before_engines_start(tmp_path, capsys, host):
    pytest.importorskip("sentence_transformers")
    file = tmp_path / "my.yaml"
    file.write_text(
        f"server: {{host: {host}, open: true}}\nmodels: {{embeddings: [{{model: m}}]}}\n", encoding="utf-8"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(file), "--port", str(port)]) == 2
    assert f"server.host={host}, server.port={port}: " in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--open"], ["--host", "127.0.0.1"]])
def test_options_of_serve_replace_what_would_be_invalid_in_the_file(tmp_path, capsys, options):
    """The taken port ends the command after its configuration was accepted."""
    pytest.importorskip("sentence_transformers")
    file = tmp_path / "my.yaml"
    file.write_text("server: {host: 0.0.0.0}\nmodels: {embeddings: [{model: m}]}\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(file), "--port", str(port), *options]) == 2
    assert f"server.port={port}: " in capsys.readouterr().err


def test_empty_host_is_refused(tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    file = tmp_path / "my.yaml"
    file.write_text("models: {embeddings: [{model: m}]}\n", encoding="utf-8")
    assert main(["serve", str(file), "--host", ""]) == 2
    assert "server.host='': " in capsys.readouterr().err
