"""Settings and fixtures of all tests."""

import os

# Set before the libraries are imported: models come from disk, and arithmetic uses one thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest_asyncio
from hypothesis import settings

from tests import programs
from tests.engines import running_vllm
from tests.mark_selection import may_select

# No time limit per example: the machine may be busy. The examples are the same in every run, so that a
# failure is caused by a change; `make fuzz` draws new ones.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("fuzz", deadline=None, max_examples=2_000)
settings.load_profile("same")


def pytest_ignore_collect(collection_path, config):
    """Leaves out test files of which `-m` selects no test."""
    if (expression := config.option.markexpr) and collection_path.name.startswith("test_"):
        # Hypothesis sets its mark itself.
        set_by_files = {line.split(":")[0] for line in config.getini("markers")} - {"hypothesis"}
        if not may_select(expression, collection_path.read_text(encoding="utf-8"), set_by_files):
            return True
    return None


def pytest_terminal_summary(terminalreporter):
    """Says which outside programs this run had."""
    terminalreporter.section("programs of the tests")
    terminalreporter.write_line(programs.summary())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_vllm():
    """One vLLM engine for all tests that leave its state unchanged.

    They run on the session's loop (`pytest.mark.asyncio(loop_scope="session")`) and have the mark `engine`.
    """
    async with running_vllm(tool_parser="hermes") as generator:
        yield generator
