"""Converts sampling parameters to vLLM's SamplingParams, and vLLM's outputs to deltas.

As in `vllm serve`, the model's defaults apply where the request states no value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from backends.vllm.json_text import json_text
from controlplane.core.errors import Refused
from controlplane.core.generation import Delta, Sampling, SamplingDefaults, TokenLogprob

_OPTIONAL_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias",
)  # fmt: skip
_REQUIRED_FIELDS = (
    "max_tokens", "n", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "logprobs", "prompt_logprobs",
)  # fmt: skip

# vLLM's finish reasons to the port's; any other is a failure. A client that disconnects closes the stream and
# never receives the abort, so an abort in an open stream is a preemption by the gate.
_FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop", "abort": "preempted"}


def structured_outputs(structure: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Converts a requested output structure to vLLM's. Raises Refused for an unknown type."""
    match structure:
        case None:
            return None
        case {"type": "json_object"}:
            return StructuredOutputsParams(json_object=True)
        case {"type": "json_schema", "schema": schema}:
            # A text, because vLLM copies the parameters deeply: 5 ms for a schema of 1,000 properties.
            return StructuredOutputsParams(json=json_text(schema))
        case {"type": "regex" | "grammar" | "choice" as kind, "value": value}:
            return StructuredOutputsParams(**{kind: list(value) if kind == "choice" else value})
    raise Refused(
        f"response format {structure!r} is unknown; use json_object, json_schema with a schema, or regex, "
        "grammar or choice with a value",
        param="response_format",
    )


def defaults_of(model_config: Any) -> tuple[Mapping[str, Any], SamplingDefaults]:
    """A model's defaults of sampling parameters, and those of them that the gate applies.

    As in `vllm serve`, a `max_new_tokens` of the model's own `generation_config.json` is for requests that
    state no limit. One that the operator states, by `override_generation_config` or in the folder that
    `generation_config` names, bounds every request.
    """
    found: Mapping[str, Any] = model_config.get_diff_sampling_param()
    stated = model_config.override_generation_config.get("max_new_tokens")
    has_folder = model_config.generation_config not in ("auto", "vllm")
    return found, SamplingDefaults(
        max_tokens=found.get("max_tokens"),
        max_tokens_limit=found.get("max_tokens") if has_folder else stated,
        presence_penalty=found.get("presence_penalty"),
        frequency_penalty=found.get("frequency_penalty"),
    )


def sampling_params(
    sampling: Sampling,
    defaults: Mapping[str, Any],
    *,
    structure: StructuredOutputsParams | None,
    skip_special_tokens: bool,
    vocabulary: int,
    extra: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Builds SamplingParams from the model's `defaults` and the request; token ids are below `vocabulary`.

    Raises one of `compat.CLIENT_ERRORS` for values out of range, and Refused for such stop tokens: vLLM 0.26
    does not check them, and with `min_tokens` its sampler writes to their logits, which on a GPU ends the
    engine or changes the tokens of other requests.
    """
    if (highest := max(sampling.stop_token_ids, default=-1)) >= vocabulary:
        raise Refused(
            f"stop_token_ids has the id {highest}; the highest of the model is {vocabulary - 1:,}. "
            "Leave it out.",
            param="stop_token_ids",
        )
    values = {**defaults, **{name: getattr(sampling, name) for name in _REQUIRED_FIELDS}}
    values |= {name: value for name in _OPTIONAL_FIELDS if (value := getattr(sampling, name)) is not None}
    return SamplingParams.from_optional(
        **values,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        skip_special_tokens=skip_special_tokens,
        structured_outputs=structure,
        extra_args=None if extra is None else dict(extra),
        output_kind=RequestOutputKind.DELTA,
    )


def with_validated(params: SamplingParams, grammar: Mapping[str, Any]) -> SamplingParams:
    """The parameters with a grammar as vLLM's validation left it, so that vLLM does not validate it again.

    The validation parses the grammar on the event loop.
    """
    public = {field.name: grammar[field.name] for field in fields(StructuredOutputsParams) if field.init}
    params.structured_outputs = StructuredOutputsParams(**public)
    for name in grammar.keys() - public.keys():
        setattr(params.structured_outputs, name, grammar[name])
    # Found before the method of the class; not sent to the engine.
    params._validate_structured_outputs = lambda *_: None
    return params


def to_delta(output: RequestOutput, completion: CompletionOutput, top: int | None) -> Delta:
    """Converts one output of a sample, with the `top` likeliest tokens per position.

    `convert_prompt_logprobs` has converted those of the prompt.

    Raises RuntimeError if the engine failed the sample.
    """
    reason = completion.finish_reason
    if reason is not None and reason not in _FINISH_REASONS:
        raise RuntimeError(f"vLLM ended the request with finish reason {reason!r}; see its log")
    return Delta(
        index=completion.index,
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=None if reason is None else _FINISH_REASONS[reason],
        stop_reason=completion.stop_reason,
        logprobs=_logprobs(completion, top),
        cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=tuple(output.prompt_logprobs or ()),
    )


def _logprobs(completion: CompletionOutput, top: int | None) -> tuple[TokenLogprob, ...]:
    if completion.logprobs is None or top is None:
        return ()
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(token_logprob(token, position, top) for token, position in pairs)


def token_logprob(token: int, position: Mapping[int, Logprob], top: int | None) -> TokenLogprob:
    """The chosen token and the `top` likeliest ones; all that vLLM returned if `top` is None."""
    ranked: Sequence[Logprob] = sorted(
        (entry for entry in position.values() if entry.rank is not None), key=lambda entry: entry.rank
    )
    chosen = position[token]
    return TokenLogprob(
        token=chosen.decoded_token or "",
        logprob=chosen.logprob,
        top=tuple((entry.decoded_token or "", entry.logprob) for entry in ranked[:top]),
        token_id=token,
    )
