"""How is the engine told what the caller wishes? Wire fields become `Sampling` and `ChatPrompt`."""

from collections.abc import Mapping
from typing import Any

import orjson

from controlplane.api.errors import Problem
from controlplane.api.protocol.json_schema import endless_reference
from controlplane.api.protocol.requests import ChatCompletionRequest, CompletionRequest, Generation
from controlplane.core.generation import ChatPrompt, Sampling

_TEMPLATE_FIELDS = ("reasoning_effort", "add_generation_prompt", "continue_final_message")
_PLACEHOLDER = 1
"""The intake puts the real bound in its place: it alone knows what still fits."""


def chat_sampling(body: ChatCompletionRequest) -> Sampling:
    return _sampling(body, (body.top_logprobs or 0) if body.logprobs else None)


def completion_sampling(body: CompletionRequest) -> Sampling:
    return _sampling(body, body.logprobs)


def _sampling(body: Generation, logprobs: int | None) -> Sampling:
    stop = body.stop
    return Sampling(
        max_tokens=_PLACEHOLDER,
        n=body.n or 1,
        temperature=body.temperature,
        top_p=body.top_p,
        # vLLM's -1 and 0 both say "all tokens".
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
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
        structure=_structure(body),
    )


def _structure(body: Generation) -> Mapping[str, Any] | None:
    wish = body.structured_outputs
    if wish is None:
        form = body.response_format
        if form is None or form.type == "text":
            return None
        schema = form.json_schema.get("schema") if form.json_schema else None
        if schema is None:
            return {"type": "json_object"}
        _require_an_end(schema, "response_format.json_schema.schema")
        return {"type": "json_schema", "schema": schema}
    if wish.json_ is not None:
        return {"type": "json_schema", "schema": _written_schema(wish.json_)}
    if wish.json_object:
        return {"type": "json_object"}
    kind, value = next((k, v) for k in ("regex", "choice", "grammar") if (v := getattr(wish, k)) is not None)
    return {"type": kind, "value": value}


def _written_schema(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    param = "structured_outputs.json"
    schema = given
    if isinstance(given, str):
        try:
            schema = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise _unfit(f"{param}: not valid JSON: {error}; send a schema", param) from None
    if not isinstance(schema, dict):
        raise _unfit(f"{param}={given!r:.80}: a schema is a JSON object; send one", param)
    _require_an_end(schema, param)
    return schema


def _require_an_end(schema: Mapping[str, Any], param: str) -> None:
    if (reference := endless_reference(schema)) is not None:
        raise _unfit(
            f"{param}: the $ref {reference!r:.80} leads back to itself and to nothing else, so no answer "
            "satisfies it; let it lead to a schema that says what is wanted",
            param,
        )


def _unfit(message: str, param: str) -> Problem:
    return Problem(400, message, param=param, code="invalid_value")


def chat_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    stated = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(body, name)) is not None}
    if body.reasoning_effort is not None:
        # Few templates know the effort, most of those that can think this switch; so it is in vLLM's server.
        stated["enable_thinking"] = body.reasoning_effort != "none"
    options = stated | (body.chat_template_kwargs or {})
    if options.get("continue_final_message"):
        # What goes on has no place for the begin of another message.
        options.setdefault("add_generation_prompt", False)
    tools = body.tools or ()
    for at, tool in enumerate(tools):
        _require_an_end(tool["function"].get("parameters") or {}, f"tools[{at}].function.parameters")
    return ChatPrompt(
        messages=body.messages,
        tools=tools,
        tool_choice=body.tool_choice or ("auto" if tools else "none"),
        template_options=options,
    )
