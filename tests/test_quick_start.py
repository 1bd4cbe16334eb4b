"""The quick start of README.md: configs/dev.yaml on real engines, README's program, and Ctrl-C at the end."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from benchmark_control_plane.common.servers import Server, free_port, serving

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quick-start")


@pytest.fixture(scope="module")
def server(folder):
    """Serves configs/dev.yaml, whose embedding worker does not wait for idle cores: tests share them."""
    config = yaml.safe_load((ROOT / "configs/dev.yaml").read_text(encoding="utf-8"))
    config["models"]["embeddings"][0]["idle_cpu_priority"] = False
    path = folder / "dev.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "controlplane.cli", "serve", str(path), "--port", str(port)]
    with pytest.MonkeyPatch.context() as patch:
        # Other tests of this process state levels for their engines.
        for name in ("VLLM_LOGGING_LEVEL", "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
            patch.delenv(name, raising=False)
        with serving(Server("tandem", command, port, "/ready"), folder / "log") as found:
            yield found


def test_the_readme_answers_from_the_documentation(server, monkeypatch):
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(
        r"^```python\n(.*?)^```", Path("README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    found = {}
    # Some pages: to embed all takes a minute of the cores that tests share.
    some = program.replace('glob("*.md")', 'glob("a*.md")')
    assert some != program
    exec(some.replace("http://127.0.0.1:8000", server.url), found)
    answer = found["answer"]
    assert answer.text
    assert set(answer.passages) <= set(found["passages"])
    # The vector of a paragraph finds this paragraph.
    assert [found["retrieve"](found["vectors"][at])[0] for at in (0, 7)] == [
        found["passages"][at] for at in (0, 7)
    ]
    assert list(answer.stage_ms) == ["embed", "retrieve", "chat"]
    assert found["vectors"].shape == (len(found["passages"]), 384)


def test_the_log_has_no_lines_of_the_engines_below_a_warning(server, folder):
    """By default, without --engine-log: neither vLLM's own form of a line nor a progress bar."""
    text = (folder / "log").read_text(encoding="utf-8")
    assert " INFO tandem: ready after " in text
    assert re.findall(r"^.*\b(?:INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d.*$", text, re.MULTILINE) == []
    assert not re.search(r" (?:INFO|DEBUG) (?:vllm|transformers|sentence_transformers)\b", text)
    assert "it/s]" not in text


def test_the_log_names_the_file_of_the_admin_key_and_does_not_hold_it(server, folder):
    text = (folder / "log").read_text(encoding="utf-8")
    (file,) = map(Path, re.findall(r"; dashboard \S+, its admin key in (\S+)$", text, re.MULTILINE))
    key = file.read_text(encoding="ascii")
    sent = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{server.url}/admin/state", headers=sent).status_code == 200
    assert key not in text


def cpu_seconds_once_it_ended(process_id: int) -> tuple[float, float]:
    """CPU seconds of a process now and at its end; the parent has not reaped it yet."""

    def looked() -> tuple[str, float]:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    _, before = looked()
    end = time.monotonic() + 60
    while (now := looked())[0] != "Z":
        assert time.monotonic() < end, "it does not end"
        time.sleep(0.05)
    return before, now[1]


def until_logged(log: Path, text: str) -> None:
    end = time.monotonic() + 10
    while text not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < end, f"{text!r} is not logged"
        time.sleep(0.02)


def test_running_request_survives_ctrl_c_and_then_the_process_exits(server, folder):
    """Must run last: it ends the server."""
    log, model = folder / "log", httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        events = answer.iter_lines()
        next(events)
        # The end of a terminal reaches every process too, and reloads the file.
        os.killpg(server.process_id, signal.SIGHUP)
        until_logged(log, "no key changed")
        # Ctrl-C reaches every process of the server, including the engine's.
        os.killpg(server.process_id, signal.SIGINT)
        rest = list(events)
    assert "data: [DONE]" in rest
    # Destroying vLLM's modules at exit would take seconds.
    before, after = cpu_seconds_once_it_ended(server.process_id)
    assert after - before < 1.5
    text = log.read_text(encoding="utf-8")
    assert "INFO tandem: stopped" in text and "Traceback" not in text and "leak" not in text
