"""What a box tells routers about its load, as one line of JSON of at most 1,000 bytes.

The forecast of the TTFT is linear in the prompt: an intercept for each owner and service class, which is the
work that precedes a new request of that class, and a slope for each model. A model that is not in the report
is not served now. Times in the JSON are milliseconds, and microseconds per token.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from controlplane.fleet.prefix_digest import PrefixDigest

HEADER_LOAD = "x-tandem-load"
MAX_REPORT_BYTES = 1_000
_MAX_READ_BYTES = 1_000_000
_LARGEST_FIGURE = 1e18


class InvalidReport(ValueError):
    """A load report cannot be read; the message names the value and what is expected."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """One served model: its owner ("llm" or "embedding"), seconds and bytes of memory per prompt token."""

    owner: str
    per_token: float
    token_bytes: int


@dataclass(frozen=True, slots=True)
class OwnerLoad:
    """One kind of work on the box.

    Attributes:
        intercepts: seconds to the first token of an empty prompt, by service class; the default one is first.
        work_ahead: seconds of prompts and embeddings that are accepted and not computed yet.
        free_bytes: memory that is neither held nor promised.
    """

    intercepts: Mapping[str, float]
    work_ahead: float
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of one box.

    Attributes:
        epoch: identifies the process; another value is another process.
        number: increases with each report of the process.
        age: seconds from the state that the report describes until it was sent.
        models: the models served now, by name.
        owners: kinds of work, by name.
        utilisation: largest part of memory, slots or TTFT objective in use; 1 where an objective is at risk.
        attainment: share of requests that met their SLO in the last minute, by class.
        served_tokens: tokens that each tenant was served since the start of the process, where requested.
        prefixes: digest of the prefix cache of each model that has one, where requested.
    """

    epoch: str
    number: int
    age: float
    models: Mapping[str, ModelLoad]
    owners: Mapping[str, OwnerLoad]
    utilisation: float = 0.0
    attainment: Mapping[str, float] = field(default_factory=dict)
    served_tokens: Mapping[str, int] = field(default_factory=dict)
    prefixes: Mapping[str, PrefixDigest] = field(default_factory=dict)

    def intercept(self, model: str, service_class: str) -> float:
        """Forecast for an empty prompt; of a class that the box does not know, the longest of all.

        An empty name is the default class. Raises KeyError if the box does not serve the model.
        """
        intercepts = self.owners[self.models[model].owner].intercepts
        known = intercepts.get(service_class or next(iter(intercepts), ""))
        return max(intercepts.values(), default=0.0) if known is None else known

    def body(self) -> str:
        """JSON of the figures without age, served tokens and prefixes; ASCII, without braces around it."""
        figures = {
            "epoch": self.epoch,
            "number": self.number,
            "models": {
                name: [m.owner, round(1e6 * m.per_token, 3), m.token_bytes] for name, m in self.models.items()
            },
            "owners": {
                name: {
                    "ttft_ms": {each: round(1e3 * s, 1) for each, s in o.intercepts.items()},
                    "ahead_ms": round(1e3 * o.work_ahead, 1),
                    "free": o.free_bytes,
                }
                for name, o in self.owners.items()
            },
            "use": round(self.utilisation, 3),
            "met": {name: round(share, 3) for name, share in self.attainment.items()},
        }
        return json.dumps(figures, separators=(",", ":"))[1:-1]

    def to_text(self) -> str:
        """The whole report as JSON."""
        extra: dict[str, object] = {}
        if self.served_tokens:
            extra["served"] = dict(self.served_tokens)
        if self.prefixes:
            extra["prefixes"] = {name: digest.to_json() for name, digest in self.prefixes.items()}
        rest = "," + json.dumps(extra, separators=(",", ":"))[1:-1] if extra else ""
        return dated(self.body() + rest, self.age)


def require_small(owners: Mapping[str, str], classes: Collection[str]) -> None:
    """Raises ValueError if a report with these names may be larger than `MAX_REPORT_BYTES`.

    Args:
        owners: owner of each served model, by the model's name.
        classes: names of the service classes.
    """
    waits = OwnerLoad(dict.fromkeys(classes, 99_999.9), 99_999.9, 10**12)
    largest = LoadReport(
        epoch="0" * 12,
        number=10**9,
        age=99_999.9,
        models={name: ModelLoad(owner, 0.012345678, 10**6) for name, owner in owners.items()},
        owners=dict.fromkeys(owners.values(), waits),
        utilisation=99.999,
        attainment=dict.fromkeys(classes, 0.999),
    )
    if (size := len(largest.to_text())) > MAX_REPORT_BYTES:
        raise ValueError(
            f"the load report of {len(owners)} models and {len(classes)} classes may have {size} bytes; a "
            f"header should have at most {MAX_REPORT_BYTES}, so shorten the names or serve fewer on one box"
        )


def dated(body: str, age: float) -> str:
    """The JSON object of a report's `body` with its age in seconds."""
    return f'{{{body},"age_ms":{1e3 * age:.1f}}}'


def parse_report(text: str | bytes) -> LoadReport:
    """Reads a report. Raises InvalidReport; unknown keys are ignored, so that boxes may be newer."""
    if len(text) > _MAX_READ_BYTES:
        raise InvalidReport(f"the report has {len(text)} bytes; the most is {_MAX_READ_BYTES}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidReport(f"the report is no JSON: {str(error)[:200]}") from None
    match found:
        case {
            "epoch": str(epoch),
            "number": int(number),
            "age_ms": int() | float() as age,
            "models": dict(models),
            "owners": dict(owners),
            "use": int() | float() as use,
            "met": dict(met),
        }:
            report = LoadReport(
                epoch=epoch,
                number=number,
                age=_figure("age_ms", age) / 1e3,
                models={name: _model(name, each) for name, each in models.items()},
                owners={name: _owner(name, each) for name, each in owners.items()},
                utilisation=_figure("use", use),
                attainment=_figures("met", met),
                served_tokens={
                    name: int(n) for name, n in _figures("served", found.get("served", {})).items()
                },
                prefixes=_digests(found.get("prefixes", {})),
            )
            _require_owners(report)
            return report
    raise InvalidReport(
        "the report lacks epoch, number, age_ms, models, owners, use or met; see docs/fleet.md"
    )


def _require_owners(report: LoadReport) -> None:
    for name, model in report.models.items():
        if model.owner not in report.owners:
            raise InvalidReport(f"models.{name}: owner {model.owner!r} is not in owners")


def _digests(values: object) -> dict[str, PrefixDigest]:
    if not isinstance(values, dict):
        raise InvalidReport("prefixes: send an object of digests by model")
    return {name: _digest(f"prefixes.{name}", value) for name, value in values.items()}


def _digest(place: str, value: object) -> PrefixDigest:
    try:
        return PrefixDigest.from_json(value)
    except ValueError as error:
        raise InvalidReport(f"{place}: {error}") from None


def _model(name: str, value: object) -> ModelLoad:
    match value:
        case [str(owner), int() | float() as per_token, int(token_bytes)]:
            return ModelLoad(
                owner,
                _figure(f"models.{name}", per_token) / 1e6,
                int(_figure(f"models.{name}", token_bytes)),
            )
    raise InvalidReport(f"models.{name}: send [owner, microseconds per token, bytes per token]")


def _owner(name: str, value: object) -> OwnerLoad:
    match value:
        case {"ttft_ms": dict(intercepts), "ahead_ms": int() | float() as ahead, "free": int(free)}:
            read = _figures(f"owners.{name}.ttft_ms", intercepts)
            return OwnerLoad(
                {each: ms / 1e3 for each, ms in read.items()},
                _figure(f"owners.{name}.ahead_ms", ahead) / 1e3,
                int(_figure(f"owners.{name}.free", free)),
            )
    raise InvalidReport(f"owners.{name}: send ttft_ms by class, ahead_ms and free")


def _figures(place: str, values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise InvalidReport(f"{place}: send an object of numbers")
    return {name: _figure(f"{place}.{name}", value) for name, value in values.items()}


def _figure(place: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST_FIGURE:
        return float(value)
    raise InvalidReport(f"{place}={str(value)[:40]}: send a number from 0 to 1e18")
