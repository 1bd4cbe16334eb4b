"""How is the engine told what the caller wishes? Wire fields become `Sampling` and `ChatPrompt`."""

from collections.abc import Mapping
from typing import Any

import orjson

from controlplane.api.errors import Problem
from controlplane.api.wire import ChatCompletionRequest, CompletionRequest, Generation
from controlplane.core.ports import ChatPrompt, Sampling

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
        return _of_schema(schema) if schema is not None else {"type": "json_object"}
    if wish.json_ is not None:
        return _of_schema(wish.json_)
    if wish.json_object:
        return {"type": "json_object"}
    kind, value = next((k, v) for k in ("regex", "choice", "grammar") if (v := getattr(wish, k)) is not None)
    return {"type": kind, "value": value}


def _of_schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise Problem(
                400,
                f"structured_outputs.json: not valid JSON: {error}; send a schema",
                param="structured_outputs.json",
                code="invalid_value",
            ) from None
    return {"type": "json_schema", "schema": schema}


def chat_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    tools = body.tools or ()
    return ChatPrompt(
        messages=body.messages,
        tools=tools,
        tool_choice=body.tool_choice or ("auto" if tools else "none"),
        template_options=options,
    )
