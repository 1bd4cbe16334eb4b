"""What the engine has still to read is time too: who would get its first token too late is told at once."""

from dataclasses import replace

import pytest

from controlplane.core.decision import Reason
from controlplane.core.memory import Footprint
from controlplane.policy.cycle import run_cycle
from tests.controlplane.policy.test_cycle import NOW, admission, one_more_at_a_time, share_of, view_of


def said(at: int, *, unread: int, width: int = 9, accepted: bool = False) -> str:
    """To one of the class number `at` beside so many: that it is in, or why not."""
    tempo = replace(one_more_at_a_time(width), per_prompt_token=1e5, unread=unread)
    share = replace(share_of([Footprint(10, steps=5)]), tempo=tempo)
    wish = {
        "footprint": Footprint(10, steps=5),
        "accepted": accepted,
        "undecided": True,
        "at": at,
        "ago_ms": 0,
    }
    plan = run_cycle(view_of(share, [wish]), NOW, admission())
    return "in" if plan.dispatches else str(plan.rejections[0][1].reason)


@pytest.mark.parametrize(("unread", "verdict"), [(19_600, "in"), (19_700, Reason.SLO_UNATTAINABLE)])
def test_who_would_wait_too_long_for_the_prompts_of_others_is_refused_at_once(
    unread: int, verdict: str
) -> None:
    """2 s are promised; a token takes 0.1 ms to read, the rest of the step under way 10 ms, its own prompt
    and first token 25."""
    assert said(1, unread=unread) == verdict


def test_who_must_be_served_or_was_let_in_before_is_not_refused_for_them() -> None:
    assert said(0, unread=99_999) == said(1, unread=99_999, accepted=True) == "in"


def test_where_nobody_is_before_it_nobody_is_refused() -> None:
    assert said(1, unread=99_999, width=0) == "in"
