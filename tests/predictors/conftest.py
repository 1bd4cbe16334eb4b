"""Fixtures that make requests for the predictors."""

from itertools import count

import pytest

from controlplane.core.clock import Instant
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from predictors.output_length.features import prompt_features


@pytest.fixture
def a_request():
    numbers = count()

    def build(*, class_name="chat", model="llm", max_tokens=1_000, prompt: str | None = None) -> Request:
        return Request(
            id=f"r{next(numbers)}",
            kind=Kind.GENERATE,
            model=model,
            tenant="t",
            service_class=ServiceClass(class_name, Slo(), priority=0, sheddable=False),
            slo=Slo(),
            arrival=Instant(0),
            prompt_tokens=10 if prompt is None else len(prompt) // 4,
            max_output_tokens=max_tokens,
            features=None if prompt is None else prompt_features(prompt),
        )

    return build


@pytest.fixture
def traffic(a_request):
    """Pairs (request, output tokens); the first word of the prompt determines the length."""
    kinds = {"list": 40, "explain": 200, "essay": 900}

    def build(random, count, *, factor=1.0, **said):
        for number in range(count):
            kind, tokens = random.choice(list(kinds.items()))
            request = a_request(prompt=f"{kind} topic {number % 37}", max_tokens=8_000, **said)
            yield request, max(1, round(factor * tokens * random.lognormvariate(0, 0.3)))

    return build
