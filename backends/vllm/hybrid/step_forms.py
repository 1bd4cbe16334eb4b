"""Carries the forms of a step's requests from the scheduler to the attention layers of the worker.

A request is identified by the number of its first block: attention metadata has no request ids, and blocks
are not shared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepForms:
    """Forms of the requests in one step, by first block.

    Attributes:
        hidden: requests on hidden states.
        converted: requests that become keys and values before this step, with their tokens so far.
    """

    hidden: frozenset[int] = frozenset()
    converted: Mapping[int, int] = field(default_factory=dict)


PLAIN = StepForms()

# A process has one worker, which runs one step at a time.
_current = PLAIN


def current() -> StepForms:
    """The forms of the step that is running."""
    return _current


@contextmanager
def applied(forms: StepForms) -> Iterator[None]:
    """Sets the forms of the step that runs within the context; other steps see only keys and values."""
    global _current  # noqa: PLW0603
    _current = forms
    try:
        yield
    finally:
        _current = PLAIN
