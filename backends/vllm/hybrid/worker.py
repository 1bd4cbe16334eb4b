"""How does a step reach the layers? vLLM's own worker of the platform, which announces the forms first.

Importing this module imports vLLM and makes the models known to it.
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
    """Graphs are captured in the pieces between vLLM's attention operations; ours is one more of them."""
    if compilation.splitting_ops:
        compilation.splitting_ops.append(f"vllm::{attention.OPERATION}")


class HybridWorker(Worker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        split_at_attention(vllm_config.compilation_config)
        super().__init__(vllm_config, *args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with step_forms.applied(getattr(scheduler_output, "cache_forms", step_forms.PLAIN)):
            return super().execute_model(scheduler_output, *args, **kwargs)
