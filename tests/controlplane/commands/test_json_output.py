"""Every command that prints results has --json; `tandem check` reads local models without network."""

import json
import socket

import pytest

from controlplane.cli import _parser, main
from controlplane.commands.reference_page import commands

# The reason of each command without --json.
_WITHOUT = {
    "serve": "runs until it is stopped, and its log has a JSON form (log.format)",
    "fleet serve": "runs until it is stopped",
    "completion": "prints a script for a shell",
}


def test_every_command_that_prints_results_has_json():
    without = {
        command.prog.removeprefix("tandem ")
        for command in commands(_parser())
        if "--json" not in command._option_string_actions
    }
    assert without == _WITHOUT.keys()


@pytest.fixture
def no_network(monkeypatch):
    """Makes every connection and every look-up of a name fail."""

    def refuse(*arguments, **named):
        raise AssertionError(f"the network was used: {arguments[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_check_of_local_models_uses_no_network(tmp_path, capsys, no_network):
    chat = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(chat), encoding="utf-8")
    file = tmp_path / "my.yaml"
    models = f"{{chat: {{model: {tmp_path}}}, embeddings: [{{model: tandem/minilm, name: e}}]}}"
    file.write_text(f"models: {models}\npool: {{memory: 2GiB}}\n", encoding="utf-8")
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
