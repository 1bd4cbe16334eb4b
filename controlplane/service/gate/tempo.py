"""How fast must the engine go on? What its steps carry now, and what is left of each promised pace.

Where the engine itself holds back, those that hold nothing count as far as there is room for them: they start
in the very next step. The others wait for memory, and make no step longer.
"""

from collections.abc import Iterable

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Kind
from controlplane.core.view import Share, Tempo
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import StepReports, StepWork


def tempo_of(tickets: Iterable[Ticket], share: Share, paces: StepReports, now: Instant) -> Tempo | None:
    """Of an LLM's share. None until enough steps were reported: what is only thought of an engine holds
    nobody back."""
    if not paces.reports_steps:
        return None
    sequences = cells = unread = 0
    room = share.ceiling - share.held
    left: list[float] = []
    tokens: list[float] = []
    promised: list[Duration] = []
    priority: list[int] = []
    leases = share.leases
    # For each cycle: to ask the ledger of one lease after the other takes five times as long.
    columns = zip(leases.base.tolist(), leases.steps.tolist(), strict=True)
    standing = dict(zip(leases.ids, columns, strict=True))
    for ticket in tickets:
        if ticket.lease is None or (request := ticket.request).kind is not Kind.GENERATE:
            continue
        held, to_go = standing[request.id]
        if not held:
            room -= ticket.footprint.base
            if room < 0:
                continue
        done, first = ticket.timeline.output_tokens, ticket.timeline.first_token
        sequences += request.sequences
        cells += request.sequences * (request.prompt_tokens + done)
        if first is None:
            unread += request.prompt_tokens
        if (tpot := request.slo.tpot) is not None:
            # `Ticket.slack`, and as much for each token to come but the next; 0 before the first.
            left.append(tpot * (done + to_go - 1) + (0 if first is None else first - now))
            tokens.append(to_go)
            promised.append(tpot)
            priority.append(request.service_class.priority)
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
        promised=np.array(promised, dtype=np.float64),
        priority=np.array(priority, dtype=np.float64),
    )
