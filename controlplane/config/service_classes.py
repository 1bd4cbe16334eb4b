"""What is promised to a class of requests?"""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds, optional_duration
from controlplane.core.slo import ServiceClass, Slo


@section(frozen=True, config=STRICT)
class ClassSection:
    priority: Annotated[int, Field(ge=0, le=100)] = 0
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    sheddable: bool = True
    default: bool = False

    def service_class(self, name: str) -> ServiceClass:
        slo = Slo(
            optional_duration(self.ttft_ms), optional_duration(self.tpot_ms), optional_duration(self.e2e_ms)
        )
        return ServiceClass(name, slo, self.priority, self.sheddable)
