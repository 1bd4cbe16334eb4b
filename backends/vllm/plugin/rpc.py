"""How is the scheduler inside EngineCore told something? One utility method, called between two steps.

    await llm.engine_core.call_utility_async("tandem", "set_quota", 512)

runs in the engine's process. `install` adds the method to EngineCore; the scheduler module does so
when it makes a scheduler, so it is there exactly where a Tandem scheduler is.
"""

from dataclasses import asdict
from typing import Any

from backends.vllm.plugin.request_metadata import parse_forecast
from controlplane.core.clock import Instant
from controlplane.core.ports import StepCost

METHOD = "tandem"
_COMMANDS = ("set_quota", "set_options", "set_forecast", "set_step_cost", "state")


def handle(scheduler: Any, command: str, argument: Any = None, *, is_idle: bool = False) -> dict[str, Any]:
    """The state after the command. `is_idle` if no step is in flight: an idle engine takes none, so it obeys
    at once. Raises ValueError for an unknown command or what the command refuses."""
    if command == "set_quota":
        scheduler.set_quota(int(argument))
    elif command == "set_options":
        scheduler.set_options(argument)
    elif command == "set_step_cost":
        scheduler.set_step_cost(StepCost(*argument))
    elif command == "set_forecast":
        forecasts = {name: parse_forecast(content) for name, content in argument.items()}
        if without := [name for name, forecast in forecasts.items() if forecast is None]:
            raise ValueError(f"set_forecast of {without[0]!r}: `levels` and `quantiles` are needed")
        for name, forecast in forecasts.items():
            scheduler.set_forecast(name, forecast)
    elif command != "state":
        raise ValueError(f"command {command!r}: unknown; known are {', '.join(_COMMANDS)}")
    if is_idle:
        scheduler.sync_idle()
    state: dict[str, Any] = scheduler.facts(Instant(scheduler.clock()))._asdict()
    return state | {"options": asdict(scheduler.options), "malformed": scheduler.malformed}


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    def tandem(core: Any, command: str, argument: Any = None) -> dict[str, Any]:
        # Where the engine runs in its caller's process, it has none.
        if hasattr(core, "input_queue"):
            core.scheduler.input_queue, core.scheduler.process_inputs = (
                core.input_queue,
                core._process_input_queue,
            )
        return handle(core.scheduler, command, argument, is_idle=not core.batch_queue)

    setattr(EngineCore, METHOD, tandem)
