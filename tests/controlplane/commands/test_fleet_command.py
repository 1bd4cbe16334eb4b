"""`tandem fleet serve` says what prevents a fleet before Ray and the boxes start."""

import socket
from pathlib import Path

import pytest

from controlplane.cli import main


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "box.yaml").write_text("models: {chat: {model: some-model}}\n", encoding="utf-8")
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("kinds: {box: {config: box.yaml, gpus: 0}}\n", encoding="utf-8")
    return str(fleet)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.commands.fleet.find_spec", lambda name: None)


def test_a_port_that_is_taken_is_named(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["fleet", "serve", file, "--port", str(port)]) == 2
    assert f"--port={port}: Address already in use; stop the program" in capsys.readouterr().err


@pytest.mark.parametrize("port", [0, 65_536])
def test_a_port_is_a_number_of_one(file: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "serve", file, "--port", str(port)]) == 2
    assert f"--port={port}: should be a number from 1 to 65535" in capsys.readouterr().err


def test_without_ray_its_extra_is_named(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert main(["fleet", "serve", file, "--port", str(port)]) == 2
    assert "the package ray is not installed; install the extra ray" in capsys.readouterr().err
