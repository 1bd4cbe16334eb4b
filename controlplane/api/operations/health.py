"""The GET endpoints for models, liveness, readiness and metrics; none of them runs a model."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane import __version__
from controlplane.api.auth import caller_of, check_metrics_key
from controlplane.api.error_dialects import is_anthropic, is_cohere
from controlplane.api.errors import Problem, down_headers
from controlplane.api.settings import settings_for
from controlplane.api.startup import starting_response
from controlplane.core.errors import BackendDown
from controlplane.service.runtime.shared_check import PATIENCE_SECONDS
from controlplane.service.service import Service
from controlplane.service.status import ModelCard

_COHERE_ENDPOINTS = {"generate": "chat", "embed": "embed", "rerank": "rerank"}
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def status_routes(service: Service) -> APIRouter:
    """Routes of /v1/models, /version, /health, /ready and /metrics."""
    routes = APIRouter()
    created = int(time.time())

    @routes.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        caller_of(request.headers, settings_for(request))
        if is_anthropic(request.headers):
            return json_response(_anthropic_list(service.status.models(), created))
        if is_cohere(request.headers):
            endpoint = request.query_params.get("endpoint")
            shown = [_cohere_model(card, created) for card in service.status.models()]
            return json_response(
                {"models": [model for model in shown if endpoint in (None, *model["endpoints"])]}
            )
        return json_response(
            {"object": "list", "data": [_shown(card, created) for card in service.status.models()]}
        )

    @routes.get("/v1/models/{model_id:path}", response_model=None)
    async def show_model(request: Request, model_id: str) -> Response:
        caller_of(request.headers, settings_for(request))
        shown: Callable[[ModelCard, int], dict[str, Any]] = _shown
        if is_anthropic(request.headers):
            shown = _anthropic_model
        elif is_cohere(request.headers):
            shown = _cohere_model
        cards = {card.id: card for card in service.status.models()}
        if model_id not in cards:
            raise Problem(
                404,
                f"model {model_id!r} is not served; choose from {', '.join(sorted(cards))}",
                param="model",
                code="model_not_found",
            )
        return json_response(shown(cards[model_id], created))

    @routes.get("/version", response_model=None)
    async def show_version() -> Response:
        return json_response({"version": __version__})

    @routes.get("/health", response_model=None)
    async def is_alive() -> Response:
        return json_response({"status": "alive"})

    @routes.get("/ready", response_model=None)
    async def is_ready() -> Response:
        return await readiness(service)

    @routes.get("/metrics", response_model=None)
    async def show_metrics(request: Request) -> Response:
        check_metrics_key(request.headers, settings_for(request).metrics_key_sha256)
        return Response(service.metrics_text(), media_type=_EXPOSITION)

    return routes


async def readiness(service: Service) -> Response:
    """The response of /ready, a 503 until the service has started.

    Raises Problem (503) unless every engine responds within two seconds.
    """
    if not service.is_started:
        return starting_response(service.progress)
    try:
        await service.check()
    except BackendDown as error:
        message, headers = f"not ready: {error}", down_headers(error)
        raise Problem(503, message, code="backend_down", headers=headers) from None
    except TimeoutError:
        message = f"not ready: no reply from the engines within {PATIENCE_SECONDS:g} s"
        raise Problem(503, message, code="backend_down") from None
    # Names the parts that fail while requests are still served; /admin/state has the details.
    impaired = service.status.impaired()
    return json_response({"status": "ready"} | ({"impaired": impaired} if impaired else {}))


def json_response(body: object) -> Response:
    """A JSON response with status 200."""
    return Response(orjson.dumps(body), media_type="application/json")


def _anthropic_list(cards: Sequence[ModelCard], created: int) -> dict[str, object]:
    """The models of /v1/messages, on one page."""
    data = [_anthropic_model(card, created) for card in cards if card.kind == "generate"]
    ids = [model["id"] for model in data] or [None]
    return {"data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


def _anthropic_model(card: ModelCard, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
    }


def _cohere_model(card: ModelCard, _created: int) -> dict[str, Any]:
    return {
        "name": card.id,
        "endpoints": [_COHERE_ENDPOINTS[card.kind]],
        "finetuned": card.parent is not None,
        "context_length": card.max_model_len,
    }


def _shown(card: ModelCard, created: int) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        # As in vLLM, whose benchmark client reads the tokenizer's name here.
        "root": card.root,
        "parent": card.parent,
        "kind": card.kind,
        "max_model_len": card.max_model_len,
    }
