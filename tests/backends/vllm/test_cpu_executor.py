"""On a CPU with one rank the engine runs the model in its own process, unless an argument says otherwise."""

import pytest

from backends import bundled_models

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

OURS = "backends.vllm.cpu_executor.InProcessExecutor"


@pytest.mark.parametrize(
    ("given", "executor"),
    [
        ({}, OURS),
        ({"tensor_parallel_size": 1}, OURS),
        ({"tensor_parallel_size": 2}, None),
        ({"distributed_executor_backend": "mp"}, "mp"),
    ],
)
def test_one_rank_on_a_cpu_needs_no_worker_process(given, executor):
    from backends.vllm.arguments import engine_args

    assert (
        engine_args(str(bundled_models.ensure_tiny_model()), "name", given).distributed_executor_backend
        == executor
    )
