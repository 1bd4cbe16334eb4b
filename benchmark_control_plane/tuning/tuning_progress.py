"""Progress of a search: a bar with the best so far on a terminal, and one line per trial."""

from typing import TextIO

from benchmark_control_plane.report.formats import yaml_value
from benchmark_control_plane.tuning.trial_search import Tried

_WIDTH = 24


class TuningProgress:
    """Writes progress to `stream`; `seconds` is the time that all replays may take, summed over processes."""

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._trials = 0
        self._best: Tried | None = None
        self._is_terminal = stream.isatty()

    def print_line(self, text: str) -> None:
        """Prints a line in place of the bar."""
        print(f"{self._clear()}{text}", file=self._stream, flush=True)

    def report(self, tried: Tried, used: float) -> None:
        """Prints the line of a trial that has ended, and redraws the bar."""
        self._trials += 1
        value = tried.comparison.value
        if self._best is None or (tried.blocks, value) > (self._best.blocks, self._best.comparison.value):
            self._best = tried
        changes = ", ".join(f"{key}={yaml_value(value)}" for key, value in tried.changes.items())
        gain = tried.comparison.gain
        self.print_line(
            f"trial {self._trials}: {gain.mean:+.1f} points on {tried.blocks} blocks: {changes or 'as it is'}"
        )
        if self._is_terminal:
            share = min(1.0, used / self._seconds)
            bar = "#" * round(_WIDTH * share)
            text = f"[{bar:{_WIDTH}}] {self._trials} trials; best {self._best.comparison.value:+.1f} points"
            print(text, end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._is_terminal else ""
