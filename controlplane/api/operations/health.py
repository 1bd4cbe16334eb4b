"""What is served, does it live, is it ready, how does it do? GET endpoints that ask no engine to work."""

import asyncio

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.api.auth import caller_of
from controlplane.api.errors import Problem
from controlplane.api.settings import ApiSettings
from controlplane.core.errors import BackendDown
from controlplane.service.service import Service
from controlplane.service.status import ModelCard

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def status_routes(service: Service, settings: ApiSettings) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        caller_of(request.headers, settings.api_keys)
        return json_response({"object": "list", "data": [_shown(card) for card in service.status.models()]})

    @routes.get("/v1/models/{model_id:path}", response_model=None)
    async def show_model(request: Request, model_id: str) -> Response:
        caller_of(request.headers, settings.api_keys)
        cards = {card.id: card for card in service.status.models()}
        if model_id not in cards:
            raise Problem(
                404,
                f"model {model_id!r} is not served; served are {', '.join(sorted(cards))}",
                param="model",
                code="model_not_found",
            )
        return json_response(_shown(cards[model_id]))

    @routes.get("/health", response_model=None)
    async def is_alive() -> Response:
        return json_response({"status": "alive"})

    @routes.get("/ready", response_model=None)
    async def is_ready() -> Response:
        try:
            async with asyncio.timeout(settings.ready_timeout_s):
                await service.check()
        except BackendDown as error:
            raise Problem(503, f"not ready: {error}", code="backend_down") from None
        except TimeoutError:
            raise Problem(
                503, f"not ready: no answer within {settings.ready_timeout_s:g} s", code="backend_down"
            ) from None
        # It serves, but not all goes on that should: by name, with the kind of fault. The state says more.
        impaired = service.status.impaired()
        return json_response({"status": "ready"} | ({"impaired": impaired} if impaired else {}))

    @routes.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        return Response(service.status.metrics_text(), media_type=_EXPOSITION)

    return routes


def json_response(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _shown(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.id,
        "object": "model",
        "created": 0,
        "owned_by": "tandem",
        # As vLLM tells them: its benchmark reads the tokenizer's name here.
        "root": card.root,
        "parent": None,
        "kind": card.kind,
        "max_model_len": card.max_model_len,
    }
