"""Progress of an experiment: a bar on a terminal, and one line per run."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

_WIDTH = 24


class ProgressDisplay:
    """Writes progress to `stream`; `runs` is the planned number, which bisection runs may exceed."""

    def __init__(self, stream: TextIO, runs: int) -> None:
        self._stream = stream
        self._runs = runs
        self._done = 0
        self._is_terminal = stream.isatty()
        self._shown = -1

    def print_line(self, text: str) -> None:
        """Prints a line in place of the bar."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def ticker(self, title: str) -> Callable[[int, int], None]:
        """Callback that draws the bar of a run, given the numbers of finished and of planned requests."""
        self._shown = -1
        return partial(self._draw, title)

    def report_run(self, title: str, entry: Mapping[str, Any]) -> None:
        """Prints the line of a finished run."""
        self._done += 1
        self._runs = max(self._runs, self._done)
        attained = entry["attainment"]["overall"]
        mark = "" if entry["valid"] else f"  INVALID: {entry['why_invalid']}"
        share = "-" if attained is None else f"{attained:6.1%}"
        rejected = entry["rates"]["reject"]
        self.print_line(
            f"[{self._done}/{self._runs}] {title}: {share} of {entry['offered_rps']:.1f}/s met their SLO, "
            f"{rejected:.1%} rejected{mark}"
        )

    def _draw(self, title: str, answered: int, planned: int) -> None:
        """Redraws the bar if its percentage changed; does nothing unless the stream is a terminal."""
        percent = 100 * answered // max(1, planned)
        if not self._is_terminal or percent == self._shown:
            return
        self._shown = percent
        bar = "#" * (_WIDTH * percent // 100)
        line = f"\r[{bar:{_WIDTH}}] {self._done}/{self._runs} runs; {title}: {answered}/{planned}"
        print(line, end="\x1b[K", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream)
