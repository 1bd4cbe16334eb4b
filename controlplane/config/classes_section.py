"""Section `classes`: the objectives, priority and load shedding of each service class."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds, optional_duration
from controlplane.core.slo import MOST_WEIGHT, ServiceClass, Slo


@section(frozen=True, config=STRICT)
class ClassSection:
    """A service class, by name. A request selects it with `x-service-class` or `service_class`."""

    priority: Annotated[int, Field(ge=0, le=100)] = 0
    """Higher is served first, within `scheduling.priority_head_start_ms`, and may preempt lower ones."""
    weight: Annotated[float, Field(gt=0, le=MOST_WEIGHT)] | None = None
    """Value of a met SLO of this class relative to other classes, for the engine orderings `srmt` and
    `apt`, for the price of an embedding pass and for what the time of an embedding call is worth to
    generations; `1 + priority` by default. Under `srmt`, a class of weight 3 goes before a class of weight 1
    unless its request needs more than three times the memory-time."""
    ttft_ms: Milliseconds | None = None
    """Objective for the time to first token; none by default."""
    tpot_ms: Milliseconds | None = None
    """Objective for the mean time per output token; none by default."""
    e2e_ms: Milliseconds | None = None
    """Objective for the time from arrival to the end; none by default."""
    gap_ms: Milliseconds | None = None
    """Objective for the longest time between two output tokens; none by default."""
    sheddable: bool = True
    """Reject a request at once if it is predicted to miss its objective, or if it is an embedding call whose
    time is worth more to generations; if false it waits, up to `admission.max_wait_ms`."""
    default: bool = False
    """Class of requests that name none; exactly one class is the default."""

    def service_class(self, name: str) -> ServiceClass:
        """Returns the class in the types of the core."""
        objectives = (self.ttft_ms, self.tpot_ms, self.e2e_ms, self.gap_ms)
        return ServiceClass(
            name, Slo(*map(optional_duration, objectives)), self.priority, self.sheddable, self.weight
        )
