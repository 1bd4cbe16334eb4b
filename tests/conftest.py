import os

# Before anything imports them: models come from disk, and arithmetic keeps to one thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest_asyncio
from hypothesis import settings

from tests.engines import running_vllm

# A property holds or fails; how long an example takes on a busy machine is no part of it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_vllm():
    """One vLLM engine for all tests that leave it as they found it; they run on the session's loop
    (`pytest.mark.asyncio(loop_scope="session")`) and carry `pytest.mark.engine`."""
    async with running_vllm(tool_parser="hermes") as generator:
        yield generator
