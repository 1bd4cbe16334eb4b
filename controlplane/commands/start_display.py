"""Shows the start of the service on a terminal: a row with a bar for each part, below the log lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from controlplane.log_output import LogOutput
from controlplane.service.runtime.start_progress import PartStart, StartProgress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

# A part that loads, then is measured or warmed up.
_STAGES = 2
_BAR_WIDTH = 24
_REFRESHES_PER_SECOND = 8


@contextmanager
def start_display(progress: StartProgress) -> Iterator[None]:
    """Shows `progress` while the block runs; without `rich` or a terminal on standard error, nothing."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    outputs = [output for output in logging.getLogger().handlers if isinstance(output, LogOutput)]
    above = _LinesAbove(console)
    for output in outputs:
        output.setStream(above)
    try:
        with Live(
            get_renderable=lambda: _rows(progress),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        ):
            yield
    finally:
        for output in outputs:
            output.setStream(sys.stderr)


class _LinesAbove:
    """A stream whose text appears above the display; long lines are left to the terminal."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    def write(self, text: str) -> None:
        """Prints the text as it is."""
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """The console has written all."""


def _rows(progress: StartProgress) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for part in progress.parts.values():
        table.add_row(*_row(part))
    return table


def _row(part: PartStart) -> "list[RenderableType]":
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    has_started = part.stage is None
    done = _STAGES if has_started else min(len(part.finished), _STAGES - 1)
    stage = "ready" if part.stage is None else part.stage.value
    return [
        Text(part.name, style="bold"),
        ProgressBar(total=_STAGES, completed=done, width=_BAR_WIDTH, pulse=not has_started and not done),
        Text(stage, style="green" if has_started else "cyan"),
        Text(f"{part.seconds:6.1f} s", style="dim"),
    ]
