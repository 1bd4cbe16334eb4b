"""The server of the fault suite: its configuration, its processes and what it states about itself."""

import contextlib
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmark_control_plane.common.process_memory import TreeMemory
from benchmark_control_plane.common.servers import free_port
from controlplane.service.decision_log.segment_files import segments

KEYS = {"load": "load-key", "other": "other-key", "attacker": "attacker-key", "limited": "limited-key"}
ADMIN_KEY = "admin-key"
CHAT_MODEL, EMBED_MODEL = "tiny-llama", "minilm"
STALL_MS = 3_000
TTFT_MS = 1_000
LIMITED_TOKENS = 2_000
"""Tokens per minute of the tenant `limited`."""
# Limits of time as short as the suite can afford; only their defaults are longer.
_LIMITS = {"header_timeout_ms": 2_000, "body_timeout_ms": 3_000, "idle_timeout_ms": 3_000}
_START_SECONDS = 600.0
_STOP_SECONDS = 40.0
ENGINE, WORKER = "EngineCore", "backends.embedding.worker"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def configuration(port: int, health_port: int, disk: Path, *, has_grammars: bool) -> dict[str, Any]:
    """The configuration of a server whose files are in `disk`; `has_grammars`: it compiles them first."""
    tenants: dict[str, Any] = {name: {"api_keys_sha256": [_digest(key)]} for name, key in KEYS.items()}
    tenants["limited"]["tokens_per_minute"] = LIMITED_TOKENS
    return {
        "server": {
            "port": port, "health_port": health_port, "drain_ms": 5_000, "stalled_client_ms": 3_000,
            "admin_key_sha256": _digest(ADMIN_KEY),
            "limits": _LIMITS | ({} if has_grammars else {"grammar_ms": 0}),
        },
        "models": {
            "chat": {
                "model": "tandem/tiny-llama", "name": CHAT_MODEL, "stall_ms": STALL_MS,
                "tool_parser": "hermes",
                # More attempts than the rows of a run need, and no wait between them.
                "restart": {"attempts": 50, "backoff_ms": 100},
                "engine": {"max_model_len": 2048, "max_num_seqs": 32, "enforce_eager": True, "block_size": 32,
                           "kv_cache_memory_bytes": 64 * 2**20},
            },
            "embeddings": [{"model": "tandem/minilm", "name": EMBED_MODEL, "batch_tokens": 4096, "threads": 1,
                            "stall_ms": STALL_MS}],
        },
        "pool": {"memory": "2GiB"},
        "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}},
        "classes": {"batch": {"priority": 0, "sheddable": False, "default": True},
                    "interactive": {"priority": 2, "ttft_ms": TTFT_MS}},
        # What the engine has not started by then is evicted, so that under overload each request is answered.
        "admission": {"max_wait_ms": 1_500},
        "tenants": tenants,
        "predictors": {"file": str(disk / "lengths"), "train_every_ms": 1_000},
        "decision_log": {"dir": str(disk / "decisions"), "keep": "2MiB"},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A started server; it may have ended."""

    process: subprocess.Popen[bytes]
    port: int
    health_port: int
    config_file: Path
    disk: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child(self, named: str) -> int | None:
        """Process id of the child whose command line contains `named`; None while there is none."""
        # A child may end between the two readings.
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
                for child in (thread / "children").read_text(encoding="ascii").split():
                    if named in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8"):
                        return int(child)
        return None

    def metrics(self) -> dict[str, float]:
        """Each series of /metrics, summed over its labels."""
        found: dict[str, float] = {}
        for sample in self._samples():
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def outcomes(self) -> Counter[str]:
        """How many requests ended with each outcome."""
        found: Counter[str] = Counter()
        for sample in self._samples():
            if sample.name == "tandem_requests_total":
                found[sample.labels["outcome"]] += int(sample.value)
        return found

    def _samples(self) -> Iterator[Sample]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
            text = page.read().decode()
        for family in text_string_to_metric_families(text):
            yield from family.samples

    def memory(self) -> TreeMemory:
        """Memory of the server and its children from now on."""
        return TreeMemory(self.process.pid)

    def descriptors(self) -> int:
        """Open descriptors of the server process."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def last_sample(self) -> float:
        """Time of the last sample in the decision log, which a job takes each second; 0 without one."""
        for file in reversed(segments(self.disk / "decisions")):
            # A full segment is replaced by a compressed one.
            with contextlib.suppress(FileNotFoundError):
                content = file.read_bytes()
                lines = (gzip.decompress(content) if file.suffix == ".gz" else content).splitlines()
                found = [json.loads(line)["at"] for line in lines if b'"row":"sample"' in line]
                if found:
                    return float(found[-1])
        return 0.0

    def rewrite_config(self, changes: Mapping[str, Any]) -> None:
        """Replaces sections of the configuration file."""
        content = yaml.safe_load(self.config_file.read_text(encoding="utf-8")) | changes
        self.config_file.write_text(yaml.safe_dump(content), encoding="utf-8")


def is_ready(port: int) -> bool:
    """Whether /ready of this port is 200; False without a connection."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def started(
    folder: Path,
    *,
    is_real: bool,
    has_grammars: bool = False,
    disk: Path | None = None,
) -> Iterator[ServerUnderTest]:
    """Starts a server in a process group of its own, which ends with the block.

    Args:
        folder: for its files.
        is_real: real engines; else simulated ones in the server's process.
        has_grammars: with the process that compiles grammars, which takes 15 s of a core to load.
        disk: for its log, checkpoint and decision log; `folder` by default.
    """
    disk = disk or folder
    port, health_port = free_port(), free_port()
    path = folder / f"tandem-{port}.yaml"
    content = configuration(port, health_port, disk, has_grammars=has_grammars)
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    simulated = "benchmark_control_plane.experiments.faults.simulated_server"
    command = ["controlplane.cli", "serve"] if is_real else [simulated]
    log = disk / f"tandem-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
            start_new_session=True,
        )
    try:
        yield ServerUnderTest(process, port, health_port, path, disk, log)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(server: ServerUnderTest) -> None:
    """Waits for /ready. Raises RuntimeError with the end of the log if the server ends or takes too long."""
    end = time.monotonic() + _START_SECONDS
    while not is_ready(server.health_port):
        if server.process.poll() is not None or time.monotonic() > end:
            tail = server.log.read_text(encoding="utf-8", errors="replace")[-2_000:]
            raise RuntimeError(f"the server is not ready; end of its log: {tail}")
        time.sleep(0.1)
