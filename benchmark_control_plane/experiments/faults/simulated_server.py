"""Serves simulated engines in the server's own process, for faults that need no real engine.

python -m benchmark_control_plane.experiments.faults.simulated_server CONFIG_FILE
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from controlplane.api.graceful_server import Hosting, host_forever
from controlplane.config.config_file import ConfigFile
from controlplane.core.kv_geometry import KvGeometry
from controlplane.service.bootstrap import build_service

# 20 ms a step, and 10 us a token of an embedding.
_STEP = sequential(llm_only(affine(0.02, 1e-4, 1e-4, 1e-7)), embedding_line(0.005, 1e-5))
_KV_BYTES = 64 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit status."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    file = ConfigFile(Path(path), {})
    config = file.load()
    chat, embedding = config.models.chat, config.models.embeddings[0]
    assert chat is not None
    device = SimulatedDevice(_STEP)
    generator = SimulatedGenerator(
        device,
        geometry=KvGeometry(elements_per_token=512, bytes_per_element=2, block_tokens=16),
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=_KV_BYTES,
        model=chat.served_name,
        max_running=32,
        scheduling=config.engine_options(),
    )
    embedder = SimulatedEmbedder(device, model=embedding.served_name)
    service = build_service(config, [generator], [embedder], workspace_bytes=embedder.budget_bytes)
    return host_forever(service, config, Hosting(file))


if __name__ == "__main__":
    sys.exit(main())
