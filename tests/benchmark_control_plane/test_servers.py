"""What a benchmark started ends with it, however it ends."""

import os
import signal
import subprocess
import sys

import pytest

from benchmark_control_plane.inputs import BadInput
from benchmark_control_plane.servers import vllm_server

_MEASURES = """
import signal, sys
from pathlib import Path
from benchmark_control_plane.servers import Server, free_port, serving, stop_as_interrupted

stop_as_interrupted()
port = free_port()
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
with serving(Server("files", command, port, "/"), Path(sys.argv[1]), own_session=False) as server:
    print(server.process_id, flush=True)
    signal.pause()
"""


def test_a_benchmark_that_is_terminated_leaves_no_server(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _MEASURES, str(tmp_path / "log")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as benchmark:  # fmt: skip
        server = int(benchmark.stdout.readline())
        os.kill(server, 0)
        benchmark.send_signal(signal.SIGTERM)
        _, complaint = benchmark.communicate(timeout=30)
    assert "KeyboardInterrupt" in complaint
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_where_vllm_is_missing_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BadInput, match="install the extra vllm"):
        vllm_server("some/model", "name", {})
