"""Serves simulated engines in the server's own process, for faults and pages that need no real engine.

The KV cache, the number of sequences and the tokens of an embedding pass are those of the configuration, and
so is the pool, which holds no more than both need.

On DEATH_SIGNAL the LLM engine dies, and the server restarts it. On SIGUSR2 its wall clock is set: the file
`clock` beside the configuration holds the seconds that it then is ahead of the machine's. The monotonic clock
stays, as when the time of a machine is set.

    python -m benchmark_control_plane.experiments.faults.simulated_server CONFIG_FILE
"""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from unittest.mock import patch

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.device.kv_memory import ElasticMemory
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.simulator.simulated_machine import GEOMETRY
from controlplane.api.graceful_server import Hosting, host_forever
from controlplane.config.config_file import ConfigFile
from controlplane.service.bootstrap import build_service

# 20 ms a step, and 10 us a token of an embedding.
_STEP = sequential(llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), embedding_line(0.005, 1e-5))
_KV_BYTES, _RUNNING, _BATCH_TOKENS = 64 * 2**20, 32, 4_096
CLOCK_FILE, CLOCK_SIGNAL = "clock", signal.SIGUSR2
DEATH_SIGNAL = signal.SIGRTMIN
# What the server reads the wall clock by: its own modules call functions of `time`, APScheduler calls these.
_DATETIMES = (
    "apscheduler.schedulers.base",
    "apscheduler.executors.base",
    "controlplane.service.runtime.timers",
)


@contextmanager
def _settable_clock(file: Path) -> Iterator[None]:
    """Sets the wall clock by the seconds in `file` at each CLOCK_SIGNAL."""
    ahead_s, read = 0.0, time.time

    def now() -> float:
        return read() + ahead_s

    class SetDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now(), tz)

    def set_clock(*_: object) -> None:
        nonlocal ahead_s
        ahead_s = float(file.read_text(encoding="ascii"))

    with ExitStack() as stack:
        stack.enter_context(patch("time.time", now))
        stack.enter_context(patch("time.time_ns", lambda: int(1e9 * now())))
        for module in _DATETIMES:
            stack.enter_context(patch(f"{module}.datetime", SetDatetime))
        signal.signal(CLOCK_SIGNAL, set_clock)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit status."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    file = ConfigFile(Path(path), {})
    config = file.load()
    chat, embedding = config.models.chat, config.models.embeddings[0]
    assert chat is not None
    device = SimulatedDevice(_STEP)
    kv_bytes = chat.engine.get("kv_cache_memory_bytes", _KV_BYTES)
    generator = SimulatedGenerator(
        device,
        geometry=GEOMETRY,
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=kv_bytes,
        model=chat.served_name,
        max_running=chat.engine.get("max_num_seqs", _RUNNING),
        scheduling=config.engine_options(),
    )
    embedder = SimulatedEmbedder(
        device, model=embedding.served_name, batch_tokens=embedding.batch_tokens or _BATCH_TOKENS
    )
    pool = kv_bytes + embedder.budget_bytes
    if config.pool.memory != "auto":
        pool = min(pool, config.pool.memory)
    service = build_service(
        config,
        [generator],
        [embedder],
        workspace_bytes=pool - kv_bytes,
        # Used only where the configuration lets quotas move.
        device_memory=lambda: ElasticMemory(pool, kv_bytes),
    )

    def kill_engine(*_: object) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(generator.die, "killed by a signal")

    signal.signal(DEATH_SIGNAL, kill_engine)
    with _settable_clock(Path(path).with_name(CLOCK_FILE)):
        return host_forever(service, config, Hosting(file))


if __name__ == "__main__":
    sys.exit(main())
