"""The /admin/explain endpoints: a dry run of the gate's decision, and the decisions on one request."""

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import require_admin
from controlplane.api.body_parsing import parse_body
from controlplane.api.errors import Problem
from controlplane.api.middleware import request_id_of
from controlplane.api.operations.health import json_response
from controlplane.api.protocol.requests import MAX_INPUTS, Objectives
from controlplane.api.settings import ANONYMOUS, settings_for
from controlplane.api.slo_headers import hints_of
from controlplane.core.generation import Sampling
from controlplane.service.gate.explanation import render_dry_run
from controlplane.service.request_jobs import EmbedJob, GenerateJob, RequestOrigin
from controlplane.service.service import Service

# Above the context length of any model.
_MAX_TOKENS = 2**24


class ExplainRequest(Objectives):
    """A hypothetical request of a given size; of embed and rerank models `inputs` of `prompt_tokens` each."""

    model: Annotated[str, Field(min_length=1)]
    prompt_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)] = 1


def explain_routes(service: Service) -> APIRouter:
    """Routes of explanations."""
    routes = APIRouter()

    @routes.post("/admin/explain", response_model=None)
    async def explain(request: Request) -> Response:
        """Returns the decision about a hypothetical request, and the numbers that it follows from."""
        require_admin(request)
        body = parse_body(await request.body(), ExplainRequest, settings_for(request).limits)
        hints = hints_of(request.scope["headers"], body)
        job = await _job(service, RequestOrigin(request_id_of(request), ANONYMOUS, hints), body)
        return json_response(render_dry_run(service.gate.dry_run(job)))

    @routes.get("/admin/explain/{request_id}", response_model=None)
    async def explain_request(request: Request, request_id: str) -> Response:
        """Returns all decisions on open and ended requests, by the client's request id or the full id.

        A request that is no longer remembered is looked up in the decision log.
        """
        require_admin(request)
        found, log = await service.gate.histories(request_id), service.status.decision_log
        if not found and log is not None:
            found = await asyncio.to_thread(log.find, request_id)
        if not found:
            kept = service.config.server.explain_requests
            elsewhere = (
                "set decision_log.dir or raise server.explain_requests to keep more"
                if log is None
                else "nor in the part of the decision log that was read in five seconds"
            )
            message = (
                f"request {request_id}: neither open nor among the last {kept:,} requests that ended; "
                f"{elsewhere}. A request that was invalid is not kept"
            )
            raise Problem(404, message, code="not_found")
        return json_response({"requests": found})

    return routes


async def _job(service: Service, origin: RequestOrigin, body: ExplainRequest) -> GenerateJob | EmbedJob:
    """Builds the job of a hypothetical request. Raises Refused as for a real request."""
    model, prompt, intake = body.model, range(body.prompt_tokens), service.intake
    kind = {card.id: card.kind for card in service.status.models()}.get(model)
    if kind == "rerank":
        return intake.pairs.of_sizes(origin, model, [body.prompt_tokens] * body.inputs)
    if kind == "embed":
        return await intake.embeddings(origin, model, [prompt] * body.inputs, takes_any_ids=True)
    return await intake.completion(origin, model, prompt, max_tokens=body.max_tokens, sampling=Sampling(1))
