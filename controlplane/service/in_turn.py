"""What does an embedding engine compute before this request? It goes by deadline, those without one last."""

from collections.abc import Mapping

from controlplane.core.ports import Embedder
from controlplane.core.request import Kind, Request
from controlplane.core.view import Waiting
from controlplane.service.ticket import Ticket


def tokens_before(
    waiting: Waiting, tickets: Mapping[str, Ticket], embedders: Mapping[str, Embedder]
) -> float:
    """Of those that were let in, less what is computed."""
    key, embedder = _deadline(waiting.request), embedders[waiting.request.model]
    return sum(
        _left(ticket.request, embedder)
        for ticket in tickets.values()
        if ticket.lease is not None
        and ticket.request.kind is Kind.EMBED
        and ticket.request.model == waiting.request.model
        and _deadline(ticket.request) <= key
    )


def _left(request: Request, embedder: Embedder) -> int:
    left = embedder.tokens_left(request.id)
    # One that was let in just now is on its way.
    return request.prompt_tokens if left is None else left


def _deadline(request: Request) -> tuple[bool, int]:
    deadline = request.slo.first_token_deadline(request.arrival)
    return (deadline is None, deadline or 0)
