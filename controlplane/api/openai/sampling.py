"""Converts request fields to the `Sampling` and `ChatPrompt` of the core."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from controlplane.api.body_parsing import check_structure
from controlplane.api.errors import Problem
from controlplane.api.protocol.anthropic_messages import MessagesChat
from controlplane.api.protocol.json_schema import MOST_NODES, endless_reference, node_count
from controlplane.api.protocol.requests import ChatCompletionRequest, CompletionRequest, Generation
from controlplane.api.protocol.tokenize_messages import TokenizeRequest
from controlplane.api.settings import BodyLimits
from controlplane.core.generation import ChatPrompt, Sampling

_TEMPLATE_FIELDS = ("reasoning_effort", "add_generation_prompt", "continue_final_message")
_PLACEHOLDER = 1
"""The intake replaces it by the bound that fits into the context."""


def chat_sampling(body: ChatCompletionRequest, limits: BodyLimits) -> Sampling:
    """Sampling parameters of a chat request. Raises Problem for an unusable schema."""
    sampling = _sampling(body, (body.top_logprobs or 0) if body.logprobs else None, limits)
    # The output is a call of the named function, whose arguments follow its schema; vLLM takes one of both.
    is_named_call = isinstance(body.tool_choice, dict) and body.structured_outputs is None
    return replace(sampling, structure=None) if is_named_call else sampling


def completion_sampling(body: CompletionRequest, limits: BodyLimits) -> Sampling:
    """Sampling parameters of a completion request. Raises Problem for an unusable schema."""
    sampling = _sampling(body, body.logprobs, limits)
    return replace(sampling, prompt_logprobs=body.logprobs, is_echoed=True) if body.echo else sampling


def _sampling(body: Generation, logprobs: int | None, limits: BodyLimits) -> Sampling:
    stop = body.stop
    return Sampling(
        max_tokens=_PLACEHOLDER,
        n=body.n or 1,
        temperature=body.temperature,
        top_p=body.top_p,
        # In vLLM -1 and 0 both mean "all tokens".
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        structure=_structure(body, limits),
    )


def _structure(body: Generation, limits: BodyLimits) -> Mapping[str, Any] | None:
    requested = body.structured_outputs
    if requested is None:
        response_format = body.response_format
        if response_format is None or response_format.type == "text":
            return None
        schema = response_format.json_schema.get("schema") if response_format.json_schema else None
        if schema is None:
            return {"type": "json_object"}
        _require_satisfiable([("response_format.json_schema.schema", schema)])
        return {"type": "json_schema", "schema": schema}
    if requested.json_ is not None:
        return {"type": "json_schema", "schema": _parsed_schema(requested.json_, limits)}
    if requested.json_object:
        return {"type": "json_object"}
    kind, value = next(
        (k, v) for k in ("regex", "choice", "grammar") if (v := getattr(requested, k)) is not None
    )
    return {"type": kind, "value": value}


def _parsed_schema(given: Mapping[str, Any] | str, limits: BodyLimits) -> Mapping[str, Any]:
    param = "structured_outputs.json"
    schema = given
    if isinstance(given, str):
        check_structure(text := given.encode(errors="replace"), limits, what=param)
        try:
            # By the parser of bodies: neither nests as deeply as `to_json` can follow.
            schema = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise _invalid(f"{param}: not valid JSON: {error}; send a schema", param) from None
    if not isinstance(schema, dict):
        raise _invalid(f"{param}={given!r:.80}: should be a JSON object with a schema; send one", param)
    _require_satisfiable([(param, schema)])
    return schema


def _require_satisfiable(schemas: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises Problem for a schema that no output satisfies, or for more than can be searched at once."""
    left = MOST_NODES
    for param, schema in schemas:
        # The text is made in a hundredth of the time of the search.
        if b'"$ref"' not in _json_text(schema):
            continue
        left -= node_count(schema, left + 1)
        if left < 0:
            raise _invalid(
                f"{param}: the schemas with a $ref have more than {MOST_NODES:,} lists and objects; send "
                "smaller ones",
                param,
            )
        if (reference := endless_reference(schema)) is not None:
            raise _invalid(
                f"{param}: the $ref {reference!r:.80} only refers back to itself, so no output can satisfy "
                "it; let it refer to a schema that ends",
                param,
            )


def _json_text(schema: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(schema)
    except orjson.JSONEncodeError:
        # An integer of more than 64 bits.
        return to_json(schema)


def _invalid(message: str, param: str) -> Problem:
    return Problem(400, message, param=param, code="invalid_value")


def chat_prompt(body: ChatCompletionRequest | TokenizeRequest) -> ChatPrompt:
    """Messages, tools and template options of a chat. Raises Problem for an unusable schema."""
    stated = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(body, name)) is not None}
    if body.reasoning_effort is not None:
        # Few chat templates read reasoning_effort, most reasoning models read this switch; as in vLLM.
        stated["enable_thinking"] = body.reasoning_effort != "none"
    options = stated | (body.chat_template_kwargs or {})
    if options.get("continue_final_message"):
        # A continued message must not be followed by the start of a new one.
        options.setdefault("add_generation_prompt", False)
    tools = body.tools or ()
    _require_satisfiable(
        (f"tools[{index}].function.parameters", tool["function"].get("parameters") or {})
        for index, tool in enumerate(tools)
    )
    return ChatPrompt(
        messages=body.messages or (),
        tools=tools,
        tool_choice=body.tool_choice or ("auto" if tools else "none"),
        template_options=options,
        add_special_tokens=bool(body.add_special_tokens),
        can_merge_system=isinstance(body, MessagesChat),
    )
