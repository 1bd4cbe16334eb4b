"""Loads LoRA adapters into a vLLM engine.

Importing this module imports vLLM, which takes seconds.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from backends.vllm.compat import EngineDeadError
from backends.vllm.process import while_alive
from controlplane.core.errors import BackendDown


async def load_adapters(
    llm: AsyncLLM, folders: Mapping[str, str], call: Callable[[], AbstractContextManager[None]]
) -> dict[str, LoRARequest]:
    """Loads each adapter once, within the context `call()`, and returns vLLM's reference to it, by name.

    vLLM keeps `max_cpu_loras` of them in memory and loads the others again when a request needs them, so only
    loading shows at the start whether an adapter fits the model. Raises ValueError for one that vLLM refuses,
    BackendDown if the engine died.

    On a CPU vLLM indexes its slots by -1 for a request without adapter and so applies that of the last slot
    if another request of the step has one (vllm-project/vllm#48421). An empty last slot changes nothing, so
    there must be more slots than adapters.
    """
    config = llm.vllm_config.lora_config
    if folders and current_platform.is_cpu() and config is not None and config.max_loras <= len(folders):
        raise ValueError(
            f"engine.max_loras={config.max_loras}: on a CPU vLLM needs more slots than the {len(folders)} "
            "lora_modules, or applies one to requests for the model itself; "
            f"set it to {len(folders) + 1} or more"
        )
    adapters = {name: LoRARequest(name, at, path) for at, (name, path) in enumerate(folders.items(), 1)}
    for name, adapter in adapters.items():
        try:
            with call():
                await while_alive(llm, llm.add_lora(adapter))
        except EngineDeadError as error:
            raise BackendDown(f"the vLLM engine died while it loaded the adapter {name}") from error
        except Exception as error:
            # Errors of the engine's process arrive as plain Exception with their text.
            raise ValueError(
                f"models.chat.lora_modules.{name}={adapter.path!r}: vLLM does not load it: {error}; "
                "name the folder of a PEFT adapter for this model, and set engine.max_lora_rank to its rank"
            ) from error
    return adapters
