"""Stages of a backend's start, reported through the context of the task that starts it.

A backend calls `enter_stage` and `note`; nothing happens unless its start is observed. So a backend needs no
reporter, and one that reports nothing counts as loading.
"""

from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol


class StartStage(StrEnum):
    """What a part of the service does before it serves."""

    LOADING = "loading"
    MEASURING = "measuring"
    WARMING_UP = "warming up"


class StageObserver(Protocol):
    """Observes the start of one part."""

    def enter(self, stage: StartStage) -> None:
        """The part begins `stage`, which ends the stage before."""

    def note(self, text: str) -> None:
        """Adds details to the line about the present stage."""


STAGE_OBSERVER: ContextVar[StageObserver | None] = ContextVar("stage_observer", default=None)


def enter_stage(stage: StartStage) -> None:
    """Reports that the part which starts in this context begins `stage`."""
    if (observer := STAGE_OBSERVER.get()) is not None:
        observer.enter(stage)


def note(text: str) -> None:
    """Adds details to the present stage of the part which starts in this context."""
    if (observer := STAGE_OBSERVER.get()) is not None:
        observer.note(text)
