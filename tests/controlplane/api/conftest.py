"""A service with scripted engines for the tests of the HTTP layer."""

from collections.abc import AsyncIterator

import pytest

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
