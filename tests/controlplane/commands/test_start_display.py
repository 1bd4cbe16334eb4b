"""The display of a start on a terminal."""

import io
import logging
import os
import pty
import sys

import pytest

from controlplane.commands.start_display import start_display
from controlplane.config.log_section import LogSection
from controlplane.core.start_stages import StartStage
from controlplane.log_output import set_engine_log_level, set_up_logging
from controlplane.service.runtime.start_progress import PartStart, StartProgress

pytest.importorskip("rich")


@pytest.fixture
def root_handlers():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def two_parts() -> StartProgress:
    progress = StartProgress(lambda: 5.0)
    progress.parts = {name: PartStart(name, lambda: 5.0) for name in ("tiny-llama", "minilm")}
    progress.parts["tiny-llama"].enter(StartStage.WARMING_UP)
    progress.parts["minilm"].end()
    return progress


def test_rows_stay_below_the_log_lines(root_handlers, monkeypatch):
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    line, progress = "a line that is longer than the terminal is wide " * 4, two_parts()
    with os.fdopen(writer, "w") as terminal, os.fdopen(reader, "rb") as shown:
        monkeypatch.setattr(sys, "stderr", terminal)
        set_up_logging(LogSection())
        with start_display(progress):
            logging.getLogger("tandem.start").info(line)
        logging.getLogger("tandem.start").info("afterwards")
        text = (shown.read() or b"").decode()
    assert "tiny-llama" in text and "warming up" in text and "ready" in text
    # In one piece, and the rows are gone at the end.
    assert line.strip() in text and text.rindex("afterwards") > text.rindex("minilm")


def test_without_a_terminal_there_are_only_lines(root_handlers, monkeypatch):
    written, progress = io.StringIO(), two_parts()
    monkeypatch.setattr(sys, "stderr", written)
    set_up_logging(LogSection())
    with start_display(progress):
        logging.getLogger("tandem.start").info("a line")
    assert written.getvalue().endswith("INFO tandem.start: a line\n") and "minilm" not in written.getvalue()


@pytest.mark.parametrize(
    ("given", "stated", "level"),
    [
        (None, None, "WARNING"),
        (None, "DEBUG", "DEBUG"),
        ("error", "DEBUG", "ERROR"),
        (None, "loud", "WARNING"),
    ],
)
def test_engines_have_a_level_of_their_own(given, stated, level, monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if stated is not None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", stated)
    set_engine_log_level(given)
    assert os.environ["VLLM_LOGGING_LEVEL"] == level
    assert os.environ["TRANSFORMERS_VERBOSITY"] == level.lower()
    assert ("TQDM_DISABLE" in os.environ) == (level not in ("DEBUG", "INFO"))
    for name in ("vllm", "transformers"):
        assert logging.getLogger(name).level == getattr(logging, level)
        logging.getLogger(name).setLevel(logging.NOTSET)
