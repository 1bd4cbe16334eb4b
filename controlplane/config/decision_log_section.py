"""Section `decision_log`: where the decision log is written, how much of it is kept, and in what detail."""

from pathlib import Path

from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Bytes, Fraction


@section(frozen=True, config=STRICT)
class DecisionLogSection:
    """The log of every request's sizes, decisions, outcome and times, for analysis and `tandem replay`.

    It holds no text of a prompt or an answer. The rows are described in docs/decision-log.md.
    """

    dir: Path | None = None
    """Folder of the log, created if it is missing; without it nothing is logged."""
    keep: Bytes = 2**30
    """Most bytes of the folder; the oldest segments are deleted beyond it."""
    sample: Fraction = 0.1
    """Share of requests whose row has the numbers behind each decision; every request has a row.
    A row takes about 50 bytes on disk, with the numbers 80."""
