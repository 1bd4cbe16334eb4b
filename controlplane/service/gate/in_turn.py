"""What does an embedding engine hold, and how much of it is still to be computed?"""

from collections.abc import Iterable, Iterator, Mapping

from controlplane.core.ports import Embedder
from controlplane.core.request import Kind, Request
from controlplane.service.ticket import Ticket


def calls_inside(
    tickets: Iterable[Ticket], embedders: Mapping[str, Embedder]
) -> Iterator[tuple[Request, float]]:
    """Those that were let in, each with its tokens less what is computed."""
    for ticket in tickets:
        request = ticket.request
        if ticket.lease is not None and request.kind is Kind.EMBED:
            left = embedders[request.model].tokens_left(request.id)
            # One that was let in just now is on its way.
            yield request, request.prompt_tokens if left is None else left
