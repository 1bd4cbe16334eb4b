"""Reads class, SLO and length forecast of a request from vLLM's sampling parameters.

`SamplingParams.extra_args["tandem"]` is a mapping. Over HTTP, where `vllm_xargs` is flat, each key has the
prefix `tandem_` instead. All keys are optional:

- `id`: the request id of the sender; `class`; `priority` (larger runs earlier); `weight` of the class
  (`1 + priority` by default);
- `arrival_ns`: arrival on this host's monotonic clock; by default the time when the engine received the
  request;
- `ttft_ms`, `tpot_ms`, `e2e_ms`, `gap_ms`: the objectives; instead of `ttft_ms` also `deadline_ns`, the
  deadline of the first token on the same clock;
- `tokens`: expected output tokens, or `levels` and `quantiles` of their distribution;
- `resumed_tokens`: tokens at the prompt's end that were generated before a preemption, streamed from
  `first_token_ns` to `last_token_ns`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from backends.vllm.plugin.shared_state import key_of
from controlplane.core.clock import Duration, Instant, milliseconds, to_milliseconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Handoff
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.request_state import RequestState

KEY = "tandem"
_PREFIX = f"{KEY}_"
_FORECAST_CACHE_SIZE = 256
# The policies hold times and priorities as int64, and a client may state any number.
_MOST = 1 << 60
_MOST_MILLISECONDS = 86_400_000
_MOST_TOKENS = 1_000_000_000
_OBJECTIVES = tuple(field.name for field in fields(Slo))
_KNOWN = (
    "id", "class", "priority", "weight", "arrival_ns", "deadline_ns", "ttft_ms", "tpot_ms", "e2e_ms",
    "gap_ms", "tokens", "levels", "quantiles", "resumed_tokens", "first_token_ns", "last_token_ns",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class EngineRequest(RequestState):
    """The policy's state of one request in vLLM."""

    external_id: str = field(kw_only=True)
    """Request id of the sender, usually the gate; all samples have it, while `request.id` is vLLM's."""
    key: int = field(init=False)
    """Key of `external_id` in the shared state."""

    def __post_init__(self) -> None:
        RequestState.__post_init__(self)
        self.key = key_of(self.external_id)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for requests without metadata; without `tokens` a request is expected to reach its limit."""

    name: str = "standard"
    priority: int = 0
    slo: Slo = field(default_factory=Slo)
    tokens: int | None = None
    weight: float | None = None


def defaults_of(config: Mapping[str, Any]) -> Defaults:
    """Parses `additional_config["tandem"]["default"]`, which has the keys above. Raises ValueError."""
    metadata = extract_metadata({KEY: config})
    slo = _slo(metadata, Slo())
    tokens = _integer(metadata, "tokens", 0) or None
    name = str(metadata.get("class", "standard"))
    return Defaults(name, _integer(metadata, "priority", 0), slo, tokens, _weight(metadata, None))


def extract_metadata(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The request's metadata in either form, without prefixes. Raises ValueError for unknown keys."""
    if not extra_args:
        return {}
    metadata = extra_args.get(KEY)
    if metadata is None:
        metadata = {k.removeprefix(_PREFIX): v for k, v in extra_args.items() if k.startswith(_PREFIX)}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"{KEY}={metadata!r}: must be a mapping; known keys are {', '.join(_KNOWN)}")
    if unknown := sorted(set(metadata) - set(_KNOWN)):
        raise ValueError(f"{KEY}.{unknown[0]}: unknown key; known are {', '.join(_KNOWN)}")
    return metadata


def metadata_of(request: Request, handoff: Handoff) -> dict[str, Any]:
    """The metadata that the gate sends with a request, read by `make_engine_request`."""
    slo, forecast = request.slo, handoff.forecast
    metadata: dict[str, Any] = {
        "id": request.id,
        "class": request.service_class.name,
        "priority": request.service_class.priority,
        # Shifted by fair queueing, so that every ordering respects the tenants' weights.
        "arrival_ns": request.arrival + handoff.fair_queueing_delay,
    }
    if request.service_class.stated_weight is not None:
        metadata["weight"] = request.service_class.stated_weight
    metadata |= {
        f"{name}_ms": to_milliseconds(limit)
        for name in _OBJECTIVES
        if (limit := getattr(slo, name)) is not None
    }
    if forecast is not None:
        metadata |= {"levels": list(forecast.levels), "quantiles": list(forecast.tokens)}
    if handoff.resumed_tokens:
        metadata |= {
            "resumed_tokens": handoff.resumed_tokens,
            "first_token_ns": handoff.first_token,
            "last_token_ns": handoff.last_token,
        }
    return metadata


def make_engine_request(
    metadata: Mapping[str, Any],
    defaults: Defaults,
    *,
    request_id: str,
    prompt_tokens: int,
    max_tokens: int,
    now: Instant,
) -> EngineRequest:
    """Builds the policy's state of a request. Raises ValueError naming a bad key.

    Args:
        metadata: what `extract_metadata` found.
        defaults: values for what it lacks.
        request_id: vLLM's id; `metadata["id"]` is the gate's, which samples of one request share.
        prompt_tokens: tokens of the prompt, of which a resumed request has generated the last ones.
        max_tokens: limit of the tokens still to generate.
        now: arrival of a request without `arrival_ns`.
    """
    arrival = Instant(_integer(metadata, "arrival_ns", now))
    slo = _slo(metadata, defaults.slo)
    if "deadline_ns" in metadata:
        slo = replace(slo, ttft=Duration(max(1, _integer(metadata, "deadline_ns", 0) - arrival)))
    name = str(metadata.get("class", defaults.name))
    priority, weight = _integer(metadata, "priority", defaults.priority), _weight(metadata, defaults.weight)
    service_class = ServiceClass(name, slo, priority, sheddable=False, stated_weight=weight)
    forecast = parse_forecast(metadata)
    resumed = max(0, min(_integer(metadata, "resumed_tokens", 0), prompt_tokens - 1))
    limit = max(1, max_tokens) + resumed
    expected = (
        forecast.mean if forecast is not None else _integer(metadata, "tokens", defaults.tokens or limit)
    )
    request = Request(
        id=request_id,
        kind=Kind.GENERATE,
        model="",
        tenant="",
        service_class=service_class,
        slo=slo,
        arrival=arrival,
        prompt_tokens=prompt_tokens - resumed,
        max_output_tokens=limit,
    )
    predicted = max(1, min(round(expected), limit))
    is_guess = not ({"tokens", "quantiles"} & metadata.keys() or defaults.tokens)
    external_id = str(metadata.get("id", request_id))
    state = EngineRequest(request, predicted, forecast, is_guess=is_guess, external_id=external_id)
    if resumed > 0:
        state.tokens += resumed
        state.record_first_token(Instant(_integer(metadata, "first_token_ns", now)))
        state.last_token = Instant(_integer(metadata, "last_token_ns", now))
    return state


def parse_forecast(metadata: Mapping[str, Any]) -> LengthForecast | None:
    """The forecast in the metadata; None if it has none. Raises ValueError if it is no distribution."""
    if "quantiles" not in metadata:
        return None
    try:
        levels = tuple(float(level) for level in metadata["levels"])
        return _cached_forecast(levels, tuple(float(tokens) for tokens in metadata["quantiles"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{KEY}.quantiles: must be a list as long as {KEY}.levels") from error


@lru_cache(maxsize=_FORECAST_CACHE_SIZE)
def _cached_forecast(levels: tuple[float, ...], quantiles: tuple[float, ...]) -> LengthForecast:
    """One object for equal forecasts, so that values derived from it are computed once."""
    forecast = LengthForecast(levels, quantiles)
    if quantiles[0] < 0 or quantiles[-1] > _MOST_TOKENS:
        raise ValueError(f"{KEY}.quantiles={quantiles}: must be between 0 and {_MOST_TOKENS:,} tokens")
    return forecast


def _slo(metadata: Mapping[str, Any], default: Slo) -> Slo:
    return Slo(**{name: _duration(metadata, f"{name}_ms", getattr(default, name)) for name in _OBJECTIVES})


def _integer(metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    with suppress(TypeError, ValueError, OverflowError):
        if abs(found := int(value)) <= _MOST:
            return found
    raise ValueError(f"{KEY}.{key}={value!r}: must be a whole number of at most 2**60")


def _weight(metadata: Mapping[str, Any], default: float | None) -> float | None:
    value = metadata.get("weight", default)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{KEY}.weight={value!r}: must be a number") from error


def _duration(metadata: Mapping[str, Any], key: str, default: Duration | None) -> Duration | None:
    if (value := metadata.get(key)) is None:
        return default
    with suppress(TypeError, ValueError, OverflowError):
        if (found := float(value)) <= _MOST_MILLISECONDS:
            return milliseconds(found)
    raise ValueError(f"{KEY}.{key}={value!r}: must be milliseconds, at most {_MOST_MILLISECONDS:,}")
