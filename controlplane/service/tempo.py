"""How fast must the engine go on? What its steps carry now, and what is left of each promised pace.

Where the engine itself holds back, those that hold nothing count as far as there is room for them: they start
in the very next step. The others wait for memory, and make no step longer.
"""

from collections.abc import Iterable

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory import MemoryLedger
from controlplane.core.request import Kind, Owner
from controlplane.core.view import Tempo
from controlplane.service.ticket import Ticket
from predictors.step_time import StepReports, StepWork


def tempo_of(
    tickets: Iterable[Ticket], ledger: MemoryLedger, paces: StepReports, now: Instant
) -> Tempo | None:
    """None until enough steps were reported: what is only thought of an engine holds nobody back."""
    if not paces.reports_steps:
        return None
    sequences = cells = unread = 0
    room = ledger.ceiling(Owner.LLM) - ledger.held(Owner.LLM)
    left: list[int] = []
    tokens: list[int] = []
    promised: list[Duration] = []
    for ticket in tickets:
        request, seen = ticket.request, ticket.timeline
        if ticket.lease is None or request.kind is not Kind.GENERATE:
            continue
        held, to_go = ledger.standing(ticket.lease)
        if not held:
            room -= ticket.footprint.base
            if room < 0:
                continue
        sequences += request.sequences
        cells += request.sequences * (request.prompt_tokens + seen.output_tokens)
        slack = ticket.slack(now) if seen.first_token is not None else Duration(0)
        if seen.first_token is None:
            unread += request.prompt_tokens
        if (tpot := request.slo.tpot) is not None and slack is not None:
            left.append(slack + tpot * (to_go - 1))
            tokens.append(to_go)
            promised.append(tpot)
    steps = paces.steps
    return Tempo(
        step=lambda sequences, cells: steps.predict(StepWork(0, sequences, cells)) * 1e9,
        per_prompt_token=steps.per_prompt_token * 1e9,
        lost_share=paces.lost_share,
        lost_deviation=paces.lost_deviation * 1e9,
        sequences=sequences,
        cells=cells,
        unread=unread,
        left=np.array(left, dtype=np.float64),
        tokens=np.array(tokens, dtype=np.float64),
        tightest=min(promised, default=None),
    )
