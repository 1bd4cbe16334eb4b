"""Tests of server processes: they end with the benchmark that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.servers import Server, free_port, serving, vllm_server

_MEASURES = """
import signal, sys
from pathlib import Path
from benchmark_control_plane.common.servers import Server, free_port, serving, interrupt_on_sigterm

interrupt_on_sigterm()
port = free_port()
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
with serving(Server("files", command, port, "/"), Path(sys.argv[1]), own_session=False) as server:
    print(server.process_id, flush=True)
    signal.pause()
"""


def test_terminated_benchmark_stops_its_servers(tmp_path):
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


_STARTS = """
import sys
from pathlib import Path
from benchmark_control_plane.common.servers import Server, all_serving, free_port, interrupt_on_sigterm

interrupt_on_sigterm()
# The server writes its process id but never becomes ready.
mute = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
logged = [(Server(name, mute, free_port(), "/"), Path(sys.argv[1], name)) for name in ("one", "other")]
with all_serving(logged):
    pass
"""


def test_termination_during_start_stops_the_servers_at_once(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as benchmark:  # fmt: skip
        servers = [_told(tmp_path / name) for name in ("one", "other")]
        benchmark.send_signal(signal.SIGTERM)
        _, complaint = benchmark.communicate(timeout=30)
    assert "KeyboardInterrupt" in complaint
    for server in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)


_INTERRUPTED = """
import os, signal, subprocess

class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Interrupted
"""


def test_termination_while_a_process_begins_stops_it(tmp_path):
    program = [sys.executable, "-c", _INTERRUPTED + _STARTS, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert "KeyboardInterrupt" in ended.stderr
    (server,) = map(int, ended.stdout.split())
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def _told(log: Path) -> int:
    """Process id in a file, once it is written."""
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text(encoding="utf-8").endswith("\n")):
        assert time.monotonic() < end, "it does not start"
        time.sleep(0.02)
    return int(log.read_text(encoding="utf-8"))


OWN_SESSION = Path("/proc/self/autogroup")


@pytest.mark.skipif(
    not (OWN_SESSION.exists() and OWN_SESSION.read_text(encoding="ascii")), reason="needs Linux's autogroups"
)
def test_niceness_of_a_server_counts_among_sessions(tmp_path):
    """Within its session, where a server is alone, it would have no effect."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with serving(Server("files", command, port, "/", nice=7), tmp_path / "log") as server:
        level = Path(f"/proc/{server.process_id}/autogroup").read_text(encoding="ascii")
    assert level.split()[-1] == "7"


def test_missing_vllm_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BadInput, match="install the extra vllm"):
        vllm_server("some/model", "name", {})


@pytest.fixture
def command_of(tmp_path, monkeypatch):
    """Command line of vLLM's server with these arguments, from the first flag on."""
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def made(arguments):
        command = list(vllm_server("some/model", "name", arguments).command)
        return command[command.index("--disable-uvicorn-access-log") + 1 :]

    return made


def test_server_with_a_given_cache_size_needs_no_free_gpu(command_of):
    sized = {"kv_cache_memory_bytes": 2**30}
    assert command_of(sized) == ["--gpu-memory-utilization", "0.01", "--kv-cache-memory-bytes", str(2**30)]
    stated = sized | {"gpu_memory_utilization": 0.5}
    assert command_of(stated)[:2] == ["--gpu-memory-utilization", "0.5"]
    by_share = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.4}
    assert command_of(by_share) == ["--gpu-memory-utilization", "0.4"]
    assert command_of({"dtype": "float16", "enforce_eager": False}) == [
        "--dtype", "float16", "--no-enforce-eager",
    ]  # fmt: skip


def test_mappings_and_lists_become_vllm_flags(command_of):
    arguments = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}, "cudagraph_capture_sizes": [1, 8]}
    assert command_of(arguments) == [
        "--compilation-config", '{"cudagraph_mode": "PIECEWISE"}', "--cudagraph-capture-sizes", "1", "8",
    ]  # fmt: skip
