"""The /admin/explain endpoints: a dry run of the gate's decision, without admitting a request."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin
from controlplane.api.errors import Problem, invalid_body
from controlplane.api.middleware import request_id_of
from controlplane.api.operations.health import json_response
from controlplane.api.protocol.requests import MAX_INPUTS, Objectives
from controlplane.api.settings import ANONYMOUS, ApiSettings
from controlplane.api.slo_headers import hints_of
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.gate.dry_run import render_dry_run
from controlplane.service.request_jobs import EmbedJob, GenerateJob, RequestHints
from controlplane.service.service import Service

# Above the context length of any model.
_MAX_TOKENS = 2**24


class ExplainRequest(Objectives):
    """A hypothetical request of a given size; for embeddings, `inputs` of `prompt_tokens` each."""

    model: Annotated[str, Field(min_length=1)]
    prompt_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)] = 1


def explain_routes(service: Service, settings: ApiSettings) -> APIRouter:
    """Routes of the dry runs."""
    routes = APIRouter()

    @routes.post("/admin/explain", response_model=None)
    async def explain(request: Request) -> Response:
        """Returns the decision about a hypothetical request, and the numbers that it follows from."""
        require_admin(request.headers, settings)
        try:
            body = ExplainRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise invalid_body(error, ExplainRequest) from None
        hints = hints_of(request.scope["headers"], body)
        job = await _job(service, request_id_of(request), body, hints)
        gate = service.gate
        return json_response(render_dry_run(gate.dry_run(gate.hypothetical(job))))

    @routes.get("/admin/explain/{request_id}", response_model=None)
    async def explain_waiting(request: Request, request_id: str) -> Response:
        """Returns the same for each part of a waiting request, found by the client's request id."""
        require_admin(request.headers, settings)
        gate = service.gate
        queued = [ticket for owner in Owner for ticket in gate.queued(owner)]
        waiting = [ticket for ticket in queued if ticket.request.id.rpartition("-")[0] == request_id]
        if not waiting:
            message = f"request {request_id} does not wait; /admin/state lists the open requests"
            raise Problem(404, message, code="not_found")
        return json_response({"waiting": [render_dry_run(gate.dry_run(ticket)) for ticket in waiting]})

    return routes


async def _job(
    service: Service, request_id: str, body: ExplainRequest, hints: RequestHints
) -> GenerateJob | EmbedJob:
    """Builds the job of a hypothetical request. Raises Refused as for a real request."""
    model, prompt, intake = body.model, range(body.prompt_tokens), service.intake
    if any(card.id == model and card.kind == "embed" for card in service.status.models()):
        return await intake.embeddings(request_id, ANONYMOUS, model, [prompt] * body.inputs, hints)
    sampling, most = Sampling(1), body.max_tokens
    return await intake.completion(
        request_id, ANONYMOUS, model, prompt, max_tokens=most, sampling=sampling, hints=hints
    )
