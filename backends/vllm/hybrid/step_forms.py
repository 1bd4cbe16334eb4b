"""Which requests of this step keep hidden states, and which change back now? Said by the scheduler, heard
by the attention of every layer.

A request is named by its first block: attention knows no other name, and no blocks are shared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepForms:
    """First blocks of the requests on hidden states; of those that become keys and values before this step,
    with the tokens that they hold so far."""

    hidden: frozenset[int] = frozenset()
    converted: Mapping[int, int] = field(default_factory=dict)


PLAIN = StepForms()

# One worker runs in a process, one step at a time.
_current = PLAIN


def current() -> StepForms:
    return _current


@contextmanager
def applied(forms: StepForms) -> Iterator[None]:
    """In force for the step within; warm-up and dummy steps find everybody plain."""
    global _current  # noqa: PLW0603
    _current = forms
    try:
        yield
    finally:
        _current = PLAIN
