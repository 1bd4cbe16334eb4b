"""A service with scripted engines for the tests of the HTTP layer."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from controlplane.api.early_signals import ENDING, RELOADING
from controlplane.api.settings import ApiSettings
from tests.controlplane.api.example_bodies import SECRET, api_key
from tests.controlplane.api.scripted_server import Stage, staged


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as stage:
        yield stage


@pytest.fixture
async def locked() -> AsyncIterator[Stage]:
    """A stage that accepts only the key SECRET."""
    async with staged(ApiSettings(api_keys=(api_key(SECRET),))) as stage:
        yield stage


@pytest.fixture
def harmless_signals() -> Iterator[None]:
    """A signal that the server does not handle fails the test instead of ending the test run."""
    ended_by = (*ENDING, *RELOADING)
    before = {number: signal.signal(number, lambda *_: None) for number in ended_by}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
