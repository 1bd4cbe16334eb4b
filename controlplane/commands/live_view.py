"""What `tandem top` knows of a server: the records of its live feed, and their content as rows of text.

The rows are plain text and numbers, so that the terminal application, `--once` and a test show the same.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from controlplane.commands.request_explanation import REASONS
from controlplane.core.request import Owner

Record = Mapping[str, Any]
Row = tuple[str, ...]

_SAMPLES = 300
# Of each type, as in the server: frequent deferrals displace no restart.
_EVENTS = 60
# Printed as text, for the same reason.
_EVENTS_OF_A_TYPE = 6
_OWNERS = {Owner.LLM.value: "LLM", Owner.EMBEDDING.value: "embeddings"}
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_NONE = "-"
_LEVELS = " ▁▂▃▄▅▆▇█"
_LINE_CELLS = 24
# Below it quotas move for lenders, as on the dashboard.
_NO_URGENCY = 1e-6
_PREDICTORS: Mapping[str, tuple[str, str]] = {
    "ttft": ("first token", "s"), "length": ("output length", "tokens"),
    "embedding_load": ("embedding load", ""), "step_time": ("engine step", "%"),
    "pass_time": ("embedding pass", "%"),
}  # fmt: skip

CLASS_COLUMNS = (
    "class", "attained 5m", "burn 5m", "burn 1h", "running", "waiting", "first token", "predicted", "held",
    "held over time",
)  # fmt: skip
OWNER_COLUMNS = ("memory", "held", "quota", "lent", "of quota", "device time", "running", "waiting")
CALIBRATION_COLUMNS = ("forecast", "outcomes within its 0.9 quantile, or their times, and the mean error")
EVENT_COLUMNS = ("age", "event", "request", "class", "detail")
LIMIT_OF_BURN = 1.0
"""Burn above this uses more than the allowed misses."""


@dataclass
class LiveView:
    """The last samples and events of one server; it begins anew when the server has restarted."""

    about: Record = field(default_factory=dict)
    instance: str | None = None
    next: int = 0
    now: float = 0.0
    samples: deque[Record] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _by_type: dict[str, deque[Record]] = field(default_factory=dict)

    def take(self, answer: Mapping[str, Any]) -> bool:
        """Adds the records of an answer of /admin/live; whether to ask again at once."""
        if self.instance not in (None, answer["instance"]):
            # The numbers of another start have another meaning.
            self.__init__()  # type: ignore[misc]
            return True
        self.instance, self.next, self.now = answer["instance"], answer["next"], answer["now"]
        self.about = answer.get("about", self.about)
        for record in answer["records"]:
            kind = record["type"]
            if "left_out_bytes" in record:
                # It was too large, and has no fields.
                continue
            # A version of the configuration may have other classes and models.
            self.about = record.get("about", self.about)
            kept = self.samples if kind == "sample" else self._by_type.setdefault(kind, deque(maxlen=_EVENTS))
            kept.append(record)
        return bool(answer["more"])

    @property
    def events(self) -> list[Record]:
        """The last events of each type, oldest first."""
        return sorted(chain.from_iterable(self._by_type.values()), key=lambda event: event["seq"])

    @property
    def sample(self) -> Record:
        """The newest sample; empty before the first."""
        return self.samples[-1] if self.samples else {}

    def to_json(self) -> dict[str, Any]:
        """The newest sample, the events, and what the server is."""
        return {"about": self.about, "now": self.now, "sample": self.sample, "events": self.events}

    def class_rows(self) -> list[Row]:
        """A row of `CLASS_COLUMNS` for each class; the lines of memory have one scale."""
        classes = self.sample.get("classes", {})
        held = {name: [_held(sample, name) for sample in self.samples] for name in classes}
        most = max((max(values) for values in held.values()), default=0)
        return [
            (*_class_row(name, found), _bytes(held[name][-1]), _line(held[name], most))
            for name, found in classes.items()
        ]

    def calibration_rows(self) -> list[Row]:
        """A row of `CALIBRATION_COLUMNS` for each predictor that has stated a forecast."""
        return [
            (title, _calibrated(found, unit))
            for key, (title, unit) in _PREDICTORS.items()
            if (found := self.sample.get("calibration", {}).get(key)) is not None
        ]

    def pool_line(self) -> str:
        """The size of the pool, and what of it is shared and withheld."""
        owners = self.sample.get("owners", {})
        shared = sum(found["shared_prefix_bytes"] for found in owners.values())
        sizes = (self.sample.get("pool_bytes", 0), shared, self.sample.get("withheld_bytes", 0))
        pool, prefixes, withheld = map(_bytes, sizes)
        return f"pool {pool}, shared prefixes {prefixes}, withheld {withheld}"

    def owner_rows(self) -> list[Row]:
        """A row of `OWNER_COLUMNS` for each owner of memory."""
        device = self.sample.get("device", {})
        return [
            _owner_row(owner, found, device.get(owner, 0.0))
            for owner, found in self.sample.get("owners", {}).items()
        ]

    def newest(self, most_of_a_type: int | None = None, *, is_filtered: bool = False) -> list[Record]:
        """The events, newest first; filtered, without routine events (`is_routine`)."""
        counts: Counter[str] = Counter()
        found = []
        for event in reversed(self.events):
            if is_filtered and is_routine(event):
                continue
            counts[event["type"]] += 1
            if most_of_a_type is None or counts[event["type"]] <= most_of_a_type:
                found.append(event)
        return found

    def event_rows(self, events: Sequence[Record]) -> list[Row]:
        """Rows of `EVENT_COLUMNS`."""
        return [self._event_row(event) for event in events]

    def series(self, path: Sequence[str]) -> list[float]:
        """One number of every sample, found by `path`; 0 where it is missing."""
        return [_number(sample, path) for sample in self.samples]

    def faults(self) -> list[str]:
        """Each fault of now in words."""
        return [f"{part}: {text}" for part, text in self.sample.get("faults", {}).items()]

    def _event_row(self, event: Record) -> Row:
        name, detail = _described(event)
        subject = event.get("id") or event.get("model") or event.get("part") or ""
        return (_age(self.now - event["at"]), name, str(subject), event.get("class", ""), detail)


def is_routine(event: Record) -> bool:
    """Whether an event says that a request was admitted at once, or that it met its SLO."""
    is_met = event["type"] == "end" and event["outcome"] in ("met", "rejected", "aborted")
    return is_met or (event["type"] == "admission" and not event["victims"])


def plain_text(view: LiveView) -> str:
    """The view as aligned text."""
    parts = [*(f"FAULT {fault}" for fault in view.faults())]
    sections = (
        (CLASS_COLUMNS, view.class_rows()),
        (OWNER_COLUMNS, view.owner_rows()),
        *(((CALIBRATION_COLUMNS, rows),) if (rows := view.calibration_rows()) else ()),
        (EVENT_COLUMNS, view.event_rows(view.newest(_EVENTS_OF_A_TYPE, is_filtered=True))),
    )
    for header, rows in sections:
        if parts:
            parts.append("")
        parts += _aligned([header, *rows])
        if header is OWNER_COLUMNS and view.samples:
            parts.append(view.pool_line())
    return "\n".join(parts)


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _class_row(name: str, found: Record) -> Row:
    recent, hour = found.get("5m", {}), found.get("1h", {})
    ended = recent.get("ended", 0)
    attained = f"{100 * recent['met'] / ended:.1f} % of {ended:,}" if ended else _NONE
    return (
        name, attained, _burn(recent), _burn(hour), str(found["running"]), str(found["waiting"]),
        _duration(found.get("ttft_ms")), _duration(found.get("predicted_ttft_ms")),
    )  # fmt: skip


def _owner_row(owner: str, found: Record, device: float) -> Row:
    quota, held = found["quota_bytes"], found["held_bytes"]
    share = f"{100 * held / quota:.0f} %" if quota else _NONE
    return (
        _OWNERS.get(owner, owner), _bytes(held), _bytes(quota), _bytes(found["lent_bytes"]), share,
        f"{100 * device:.0f} %", str(found["running"]), str(found["waiting"]),
    )  # fmt: skip


def _described(event: Record) -> tuple[str, str]:
    """The name of an event, and its details in words."""
    match event["type"]:
        case "admission":
            wait = f"predicted wait {_duration(event['wait_ms'])}" if event.get("wait_ms") else ""
            victims = f"after preempting {event['victims']}" if event["victims"] else ""
            return "admitted", " ".join(filter(None, (victims, wait)))
        case "deferral":
            return "deferred", REASONS.get(event["reason"], event["reason"])
        case "rejection":
            retry = event.get("retry_after_ms")
            after = "no retry can help" if retry is None else f"retry after {_duration(retry)}"
            return "rejected", f"{REASONS.get(event['reason'], event['reason'])}, {after}"
        case "end":
            missed = f"missed {', '.join(event['missed'])}" if event["missed"] else ""
            first = f"first token {_duration(event['ttft_ms'])}" if event.get("ttft_ms") is not None else ""
            return event["outcome"], ", ".join(filter(None, (missed, first)))
        case "preemption":
            own = "waiting embeddings" if event["by"] == "gate" else "the running requests"
            cost = f"{event['recompute_tokens']:,} tokens to compute again"
            time = f" in {_duration(took)}" if (took := event.get("recompute_ms")) is not None else ""
            freed = f", freed {_bytes(size)}" if (size := event.get("freed_bytes")) is not None else ""
            return "preempted", f"for {event['for'] or own}, {cost}{time}{freed}"
        case "quota":
            return "quota", _moved(event)
        case "restart":
            return f"{event['part']} {event['state']}", event.get("text", "")
        case "config" if "guard" in event:
            return f"version {event['version']} {event['guard'].replace('_', ' ')}", event["text"]
        case "config":
            changes = "; ".join(f"{key}: {a} -> {b}" for key, (a, b) in event["changes"].items())
            return f"version {event['version']}", changes or "the configuration of the start"
        case "fault":
            return f"fault {event['state']}", event["text"]
        case other:
            return str(other), ""


def _moved(event: Record) -> str:
    """Who gained how much, and the urgency of both owners at the largest move."""
    moved = event["to"][Owner.LLM.value] - event["from"][Owner.LLM.value]
    gains = _OWNERS[Owner.LLM.value if moved > 0 else Owner.EMBEDDING.value]
    moves = "one move" if event["moves"] == 1 else f"{event['moves']} moves"
    size = f"+{_bytes(abs(moved))} for {gains} in {moves}" if moved else f"there and back in {moves}"
    urgency = event["urgency"]
    if sum(urgency.values()) < _NO_URGENCY:
        return f"{size}, unused memory lent or taken back"
    return f"{size}, urgency {', '.join(f'{_OWNERS[owner]} {urgency[owner]:.2f}' for owner in _OWNERS)}"


def _calibrated(found: Record, unit: str) -> str:
    errors = found.get("error", {})
    parts = []
    for name, ratio in found.get("ratio", {}).items():
        parts.append(f"{name} {100 * ratio:.0f} % of the forecast ({100 * errors[name]:.0f} {unit})")
    for name, share in found.get("coverage", {}).items():
        error = f" ({_error(errors[name], unit)})" if name in errors else ""
        parts.append(f"{name if unit else f'quantile {name}'} {100 * share:.0f} %{error}")
    return ", ".join(parts) or "no outcome yet"


def _error(error: float, unit: str) -> str:
    return _duration(1_000 * error) if unit == "s" else f"{error:,.0f} {unit}"


def _held(sample: Record, name: str) -> int:
    """Bytes of the leases of a class."""
    owners = sample.get("owners", {}).values()
    return sum(found["held_by_class"].get(name, 0) for found in owners)


def _line(values: Sequence[float], most: float) -> str:
    """Values as blocks from the oldest to the newest; each is the largest of its part of the time."""
    size = max(1, -(-len(values) // _LINE_CELLS))
    parts = [max(values[at : at + size]) for at in range(0, len(values), size)]
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, math.ceil(top * part / most)) if most else 0] for part in parts)


def _number(sample: Record, path: Sequence[str]) -> float:
    found: Any = sample
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return float(found or 0.0)


def _burn(window: Record) -> str:
    return _NONE if window.get("burn") is None else f"{window['burn']:.2f}"


def _duration(milliseconds: float | None) -> str:
    if milliseconds is None:
        return _NONE
    return f"{milliseconds:.0f} ms" if milliseconds < 1_000 else f"{milliseconds / 1_000:.1f} s"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bytes(size: float) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} B"
