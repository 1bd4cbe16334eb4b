"""A service with scripted engines for the tests of the HTTP layer."""

from collections.abc import AsyncIterator

import pytest

from tests.controlplane.api.scripted_server import Stage, staged


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as stage:
        yield stage
