"""The sizes of a log's machine are those that the server had."""

import pytest

from benchmark_control_plane.decision_replay.recorded_device import DeviceCosts, logged_machine
from controlplane.core.engine_reports import DeviceSharing


@pytest.mark.parametrize("batches", [1, 1.25, 3.5])
def test_the_memory_of_passes_need_not_be_a_multiple_of_the_largest(batches):
    embedder = {"workspace_bytes": 4_096 * 1_024, "bytes_per_token": 1_024}
    embedder |= {"max_input_tokens": 512, "max_running": 64}
    facts = {
        "pool_bytes": None, "workspace_bytes": int(batches * 4_096 * 1_024), "generators": {},
        "embedders": {"e": embedder},
    }  # fmt: skip
    costs = DeviceCosts((0.0, 0.0, 0.0, 0.0), (0.01, 0.0, 0.0))
    machine = logged_machine(facts, "e", costs, DeviceSharing.TURNS, [])
    assert (machine.embed_batch_tokens, machine.workspace_batches) == (4_096, batches)
