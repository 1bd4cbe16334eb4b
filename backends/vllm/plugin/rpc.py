"""The utility method of EngineCore through which the server controls Tandem's scheduler.

    await llm.engine_core.call_utility_async("tandem", "set_quota", [512, 512])

runs in the engine's process, between two steps. `install` adds the method to EngineCore when a Tandem
scheduler is created, so only such engines have it.
"""

from dataclasses import asdict
from typing import Any

from backends.vllm.plugin.request_metadata import parse_forecast
from controlplane.core.clock import Instant
from controlplane.core.engine_reports import StepCost

METHOD = "tandem"
_COMMANDS = ("set_quota", "set_options", "set_forecast", "set_step_cost", "state")


def handle(scheduler: Any, command: str, argument: Any = None, *, is_idle: bool = False) -> dict[str, Any]:
    """Runs one command on the scheduler and returns its state afterwards.

    Args:
        scheduler: a `TandemScheduling`.
        command: one of `set_quota` (blocks of the quota and of the use ceiling), `set_options` (mapping),
            `set_forecast` (mapping of request id to levels and quantiles), `set_step_cost` (the four numbers
            of StepCost) and `state`.
        argument: the command's argument.
        is_idle: no step is in flight. An idle engine takes no step, so the quota is applied at once.

    Raises ValueError for an unknown command and for an invalid argument.
    """
    if command == "set_quota":
        scheduler.set_quota(*map(int, argument))
    elif command == "set_options":
        scheduler.set_options(argument)
    elif command == "set_step_cost":
        scheduler.set_step_cost(StepCost(*argument))
    elif command == "set_forecast":
        forecasts = {name: parse_forecast(content) for name, content in argument.items()}
        if without := [name for name, forecast in forecasts.items() if forecast is None]:
            raise ValueError(f"set_forecast of {without[0]!r} needs `levels` and `quantiles`; give both")
        for name, forecast in forecasts.items():
            scheduler.set_forecast(name, forecast)
    elif command != "state":
        raise ValueError(f"command {command!r}: unknown; known are {', '.join(_COMMANDS)}")
    if is_idle:
        scheduler.sync_idle()
    state: dict[str, Any] = scheduler.facts(Instant(scheduler.clock()))._asdict()
    return state | {"options": asdict(scheduler.options), "malformed": scheduler.malformed}


def install() -> None:
    """Adds the method to vLLM's EngineCore class."""
    from vllm.v1.engine.core import EngineCore

    def tandem(core: Any, command: str, argument: Any = None) -> dict[str, Any]:
        # Only an engine in a process of its own has an input queue.
        if hasattr(core, "input_queue"):
            core.scheduler.input_queue, core.scheduler.process_inputs = (
                core.input_queue,
                core._process_input_queue,
            )
        return handle(core.scheduler, command, argument, is_idle=not core.batch_queue)

    setattr(EngineCore, METHOD, tandem)
