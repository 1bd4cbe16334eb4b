"""Requests for predictors."""

from itertools import count

import pytest

from controlplane.core.clock import Instant
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo


@pytest.fixture
def a_request():
    numbers = count()

    def build(*, class_name="chat", model="llm", max_tokens=1_000) -> Request:
        return Request(
            id=f"r{next(numbers)}",
            kind=Kind.GENERATE,
            model=model,
            tenant="t",
            service_class=ServiceClass(class_name, Slo(), priority=0, sheddable=False),
            slo=Slo(),
            arrival=Instant(0),
            prompt_tokens=10,
            max_output_tokens=max_tokens,
        )

    return build
