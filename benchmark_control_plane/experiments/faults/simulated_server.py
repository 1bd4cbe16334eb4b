"""Serves simulated engines in the server's own process, for faults and pages that need no real engine.

The KV cache, the number of sequences and the tokens of an embedding pass are those of the configuration, and
so is the pool, which holds no more than both need.

python -m benchmark_control_plane.experiments.faults.simulated_server CONFIG_FILE
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.device.kv_memory import ElasticMemory
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from controlplane.api.graceful_server import Hosting, host_forever
from controlplane.config.config_file import ConfigFile
from controlplane.core.kv_geometry import KvGeometry
from controlplane.service.bootstrap import build_service

# 20 ms a step, and 10 us a token of an embedding.
_STEP = sequential(llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), embedding_line(0.005, 1e-5))
_KV_BYTES, _RUNNING, _BATCH_TOKENS = 64 * 2**20, 32, 4_096


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
        geometry=KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16),
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
    return host_forever(service, config, Hosting(file))


if __name__ == "__main__":
    sys.exit(main())
