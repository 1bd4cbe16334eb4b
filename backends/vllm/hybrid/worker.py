"""Extends vLLM's worker class (GPU or CPU) to set each request's cache form before the model runs.

Importing this module imports vLLM and registers the hybrid models with it.
"""

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from backends.vllm.hybrid import attention, models, step_forms

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker

models.register()


def split_at_attention(compilation: Any) -> None:
    """Adds our attention operation to those at which vLLM splits graphs before capturing them."""
    if compilation.splitting_ops:
        compilation.splitting_ops.append(f"vllm::{attention.OPERATION}")


class HybridWorker(Worker):  # type: ignore[misc]
    """The platform's worker; named by `worker_cls`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        split_at_attention(vllm_config.compilation_config)
        super().__init__(vllm_config, *args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs one step with the forms that the scheduler attached to it."""
        with step_forms.applied(getattr(scheduler_output, "cache_forms", step_forms.PLAIN)):
            return super().execute_model(scheduler_output, *args, **kwargs)
