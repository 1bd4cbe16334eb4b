"""How is the scheduler inside EngineCore told something? One utility method, called between two steps.

    await llm.engine_core.call_utility_async("tandem", "set_quota", 512)

runs in the engine's process. `install` adds the method to EngineCore; the scheduler module does so
when it makes a scheduler, so it is there exactly where a Tandem scheduler is.
"""

from dataclasses import asdict
from typing import Any

from backends.vllm.plugin.request_metadata import forecast_of
from controlplane.core.clock import Instant
from controlplane.core.ports import StepCost

METHOD = "tandem"
_ORDERS = ("set_quota", "set_options", "set_forecast", "set_step_cost", "state")


def handle(scheduler: Any, order: str, argument: Any = None, *, is_quiet: bool = False) -> dict[str, Any]:
    """The state after the order. `is_quiet` if no step is in flight: an idle engine takes none, so it obeys
    at once. Raises ValueError for an unknown order or what the order refuses."""
    if order == "set_quota":
        scheduler.set_quota(int(argument))
    elif order == "set_options":
        scheduler.set_options(argument)
    elif order == "set_step_cost":
        scheduler.expect(StepCost(*argument))
    elif order == "set_forecast":
        forecasts = {name: forecast_of(said) for name, said in argument.items()}
        if without := [name for name, forecast in forecasts.items() if forecast is None]:
            raise ValueError(f"set_forecast of {without[0]!r}: `levels` and `quantiles` are needed")
        for name, forecast in forecasts.items():
            scheduler.set_forecast(name, forecast)
    elif order != "state":
        raise ValueError(f"order {order!r}: unknown; known are {', '.join(_ORDERS)}")
    if is_quiet:
        scheduler.settle()
    state: dict[str, Any] = scheduler.facts(Instant(scheduler.clock()))._asdict()
    return state | {"options": asdict(scheduler.options), "malformed": scheduler.malformed}


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    def tandem(core: Any, order: str, argument: Any = None) -> dict[str, Any]:
        # Where the engine runs in its caller's process, it has none.
        if hasattr(core, "input_queue"):
            core.scheduler.inputs, core.scheduler.take_in = core.input_queue, core._process_input_queue
        return handle(core.scheduler, order, argument, is_quiet=not core.batch_queue)

    setattr(EngineCore, METHOD, tandem)
