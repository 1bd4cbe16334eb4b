"""Fixtures that make requests for the predictors."""

from itertools import count

import pytest

from controlplane.core.request import Request
from predictors.output_length.features import prompt_features
from tests import example_requests


@pytest.fixture
def a_request():
    numbers = count()

    def build(*, class_name="chat", model="llm", max_tokens=1_000, prompt: str | None = None) -> Request:
        tokens = 10 if prompt is None else len(prompt) // 4
        features = None if prompt is None else prompt_features(prompt)
        name = f"r{next(numbers)}"
        return example_requests.a_request(
            name, tokens, max_tokens, class_name=class_name, model=model, features=features
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
