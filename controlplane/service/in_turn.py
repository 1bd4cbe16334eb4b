"""What does an embedding engine compute before this request? It goes by deadline, those without one last."""

from collections.abc import Iterable

from controlplane.core.request import Kind, Request
from controlplane.core.view import Waiting
from controlplane.service.ticket import Ticket


def tokens_before(waiting: Waiting, tickets: Iterable[Ticket]) -> float:
    """Of those it holds. What they have done of it already is not known, and counts."""
    key = _deadline(waiting.request)
    return sum(
        ticket.request.prompt_tokens
        for ticket in tickets
        if ticket.lease is not None
        and ticket.request.kind is Kind.EMBED
        and ticket.request.model == waiting.request.model
        and _deadline(ticket.request) <= key
    )


def _deadline(request: Request) -> tuple[bool, int]:
    deadline = request.slo.first_token_deadline(request.arrival)
    return (deadline is None, deadline or 0)
