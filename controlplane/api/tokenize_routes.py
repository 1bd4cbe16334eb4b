"""POST /tokenize and /detokenize, in vLLM's shapes; neither runs a model."""

from functools import partial

import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.openai.sampling import chat_prompt
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json
from controlplane.api.protocol.tokenize_messages import DetokenizeRequest, TokenizeRequest
from controlplane.service.service import Service


def tokenize_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of tokenization."""
    return [
        endpoints.route("/tokenize", TokenizeRequest, partial(_tokenize, service)),
        endpoints.route("/detokenize", DetokenizeRequest, partial(_detokenize, service)),
    ]


async def _tokenize(service: Service, request: ParsedRequest[TokenizeRequest], send: Send) -> None:
    body, tokenization = request.body, service.intake.tokenization
    has_strings = bool(body.return_token_strs)
    if body.prompt is None:
        prompt = chat_prompt(body)
        found = await tokenization.chat(request.origin.caller, body.model, prompt, has_strings=has_strings)
    else:
        found = await tokenization.text(
            request.origin.caller,
            body.model,
            body.prompt,
            add_special_tokens=body.add_special_tokens is not False,
            has_strings=has_strings,
        )
    reply = {
        "count": len(found.token_ids),
        "max_model_len": found.max_model_tokens,
        "tokens": found.token_ids,
        "token_strs": found.strings,
    }
    await send_json(send, orjson.dumps(reply), [])


async def _detokenize(service: Service, request: ParsedRequest[DetokenizeRequest], send: Send) -> None:
    text = await service.intake.tokenization.decoded(
        request.origin.caller, request.body.model, request.body.tokens
    )
    await send_json(send, orjson.dumps({"prompt": text}), [])
