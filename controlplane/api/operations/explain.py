"""What would be decided about a request now, and why? For the operator, who lets nobody in by asking."""

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
from controlplane.service.gate.explain import render_dry_run
from controlplane.service.jobs import EmbedJob, GenerateJob, RequestHints
from controlplane.service.service import Service

# More than any model takes.
_MOST_TOKENS = 2**24


class ExplainRequest(Objectives):
    """A request of which only the size is known. `inputs` of so many tokens each, for embeddings."""

    model: Annotated[str, Field(min_length=1)]
    prompt_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)] = 1


def explain_routes(service: Service, settings: ApiSettings) -> APIRouter:
    routes = APIRouter()

    @routes.post("/admin/explain", response_model=None)
    async def explain(request: Request) -> Response:
        """What would be decided about such a request now, and from which numbers."""
        require_admin(request.headers, settings)
        try:
            supposed = ExplainRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise invalid_body(error, ExplainRequest) from None
        hints = hints_of(request.scope["headers"], supposed)
        job = await _job(service, request_id_of(request), supposed, hints)
        gate = service.gate
        return json_response(render_dry_run(gate.dry_run(gate.hypothetical(job))))

    @routes.get("/admin/explain/{request_id}", response_model=None)
    async def explain_waiting(request: Request, request_id: str) -> Response:
        """The same about each part of a request that waits, by the id that its caller knows."""
        require_admin(request.headers, settings)
        gate = service.gate
        queued = [one for owner in Owner for one in gate.queued(owner)]
        waiting = [one for one in queued if one.request.id.rpartition("-")[0] == request_id]
        if not waiting:
            told = f"{request_id}: no such request waits; /admin/state lists those that are here"
            raise Problem(404, told, code="not_found")
        return json_response({"waiting": [render_dry_run(gate.dry_run(one)) for one in waiting]})

    return routes


async def _job(
    service: Service, request_id: str, supposed: ExplainRequest, hints: RequestHints
) -> GenerateJob | EmbedJob:
    """Raises Refused, as for a real one."""
    model, prompt, intake = supposed.model, range(supposed.prompt_tokens), service.intake
    if any(card.id == model and card.kind == "embed" for card in service.status.models()):
        return await intake.embeddings(request_id, ANONYMOUS, model, [prompt] * supposed.inputs, hints)
    sampling, most = Sampling(1), supposed.max_tokens
    return await intake.completion(
        request_id, ANONYMOUS, model, prompt, max_tokens=most, sampling=sampling, hints=hints
    )
