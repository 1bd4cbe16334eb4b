"""The file through which an engine's workers connect is in the run directory, not in the temporary folder."""

from pathlib import Path

import pytest

from backends.run_directory import run_directory

pytestmark = [pytest.mark.engine, pytest.mark.untimed]
NAME = "get_file_store_init_method"


@pytest.fixture
def files(monkeypatch) -> list[str]:
    """The files of the executors in an engine process that is started next; no engine runs."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from backends.vllm import process

    executors, found = (uniproc_executor, multiproc_executor), []
    for executor in executors:
        # Restored after the test, since the process is this one.
        monkeypatch.setattr(executor, NAME, getattr(executor, NAME))
    monkeypatch.setattr(process, "end_with_parent", lambda: None)
    monkeypatch.setattr(
        process, "_run_engine_core", lambda: found.extend(getattr(each, NAME)() for each in executors)
    )
    return found


def test_it_is_where_the_next_server_removes_it(files: list[str], monkeypatch):
    from backends.vllm.process import run_engine_core, sockets_in_run_directory

    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with sockets_in_run_directory():
        run_engine_core()
    assert len(set(files)) == 2
    for file in files:
        assert Path(file.removeprefix("file://")).parent == run_directory()


def test_it_follows_a_path_that_the_operator_has_set(files: list[str], monkeypatch, tmp_path):
    from backends.vllm.process import run_engine_core, sockets_in_run_directory

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    with sockets_in_run_directory():
        run_engine_core()
    assert {Path(file.removeprefix("file://")).parent for file in files} == {tmp_path}
