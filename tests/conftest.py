import os

# Before anything imports them: models come from disk, and arithmetic keeps to one thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest_asyncio
from hypothesis import settings

from tests.engines import running_vllm

# A property holds or fails; how long an example takes on a busy machine is no part of it. The same examples
# every time, so that what fails a change is the change; `make fuzz` looks where nobody has looked.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2_000)
settings.load_profile("same")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_vllm():
    """One vLLM engine for all tests that leave it as they found it; they run on the session's loop
    (`pytest.mark.asyncio(loop_scope="session")`) and carry `pytest.mark.engine`."""
    async with running_vllm(tool_parser="hermes") as generator:
        yield generator
