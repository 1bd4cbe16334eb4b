"""Samples the service once a second for the live feed, and records changes of its parts as events.

A sample reads ledger, tickets, predictors and what the engine's scheduler publishes, and waits for no engine.
Between two samples, quota moves are merged into one event. Samples need a timer, which only a served
application starts; in virtual time a caller takes them with `sample`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import compress
from operator import attrgetter

from controlplane.core.clock import Duration, Instant, to_milliseconds, to_seconds
from controlplane.core.request import Owner
from controlplane.core.slo import ServiceClass
from controlplane.service.attainment_windows import TARGET, WINDOWS, Attained
from controlplane.service.memory.quota_report import load_coverage
from controlplane.service.prediction.length_training import calibration_of
from controlplane.service.runtime.change_guard import ChangeGuard
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.runtime.timers import LoopTimer
from controlplane.service.status import ServiceStatus

PERIOD_SECONDS = 1.0
# More would not fit into an answer.
_MAX_CLASSES = 50
_MAX_TEXT = 500
_MAX_CHANGES = 20
# A long prompt's step takes seconds.
_MOST_PENDING_SECONDS = 10.0
_class_name = attrgetter("request.service_class.name")
_request_id = attrgetter("request.id")


@dataclass(slots=True)
class MergedMoves:
    """Quota moves since the last sample: first and last quotas, and the urgency at the largest move."""

    before: Mapping[Owner, int]
    after: Mapping[Owner, int]
    urgency: Mapping[Owner, float]
    largest: int
    count: int


@dataclass(frozen=True, slots=True)
class ShownVersion:
    """One version of the configuration: its number, its classes by name, and its document."""

    number: int
    classes: Mapping[str, ServiceClass]
    document: Mapping[str, object]


class LiveFeed:
    """The sampler of one started service."""

    def __init__(
        self, status: ServiceStatus, version: ShownVersion, faults_now: Callable[[], Mapping[str, str]]
    ) -> None:
        """`faults_now` returns what fails now in words, by the name of the part."""
        self._version = version
        self._faults_now = faults_now
        self._status = status
        self._recorder = status.dispatcher.recorder
        self._timer = LoopTimer()
        self._health = HealthTracker("the live feed has no new samples", "the live feed has samples again")
        self._moves: MergedMoves | None = None
        self._faults: dict[str, str] = {}
        self._shown_seconds = dict(status.metrics.device_time)
        self._restarts = self._worker_restarts()
        self._sampled_at = self._recorder.records.clock.now()
        if status.quota_controller is not None:
            status.quota_controller.on_move = self._moved
        self._add("config", {"version": version.number, "changes": {}})

    def start(self) -> None:
        """Samples every second from now on."""
        self._timer.schedule_periodic(PERIOD_SECONDS, self._sample_or_fail)

    def stop(self) -> None:
        """Ends sampling."""
        self._timer.stop()

    def since(self, number: int, instance: str) -> bytes:
        """The records after `number` as JSON (`LiveRecords.since`); with 0 also what does not change.

        `instance` names this start of the server, since its numbers begin anew with each.
        """
        about = {"instance": instance} | ({"about": self._about()} if number == 0 else {})
        return self._recorder.records.since(number, about)

    def engine_down(self, model: str, reason: str) -> None:
        """Records the death of an LLM engine."""
        self._add("restart", {"part": "engine", "model": model, "state": "down", "text": reason[:_MAX_TEXT]})

    def engine_up(self, model: str, took: float) -> None:
        """Records the restart of an LLM engine, which took so many seconds."""
        self._add("restart", {"part": "engine", "model": model, "state": "up", "seconds": round(took, 3)})

    def configured(self, version: ShownVersion) -> None:
        """Records a change of the configuration: each changed key with its former and its new value.

        Its `about` replaces the one that readers got with their first answer.
        """
        changes = dict(list(_differences(self._version.document, version.document))[:_MAX_CHANGES])
        self._version = version
        self._add("config", {"version": version.number, "changes": changes, "about": self._about()})

    def guard_ended(self, guard: ChangeGuard) -> None:
        """Records how the guard of a change ended, and why."""
        fields = {"guard": guard.state.value, "text": guard.reason[:_MAX_TEXT]}
        self._add("config", {"version": guard.version, "changes": {}, **fields})

    def worker_changed(self, model: str, state: str, text: str) -> None:
        """Records that a change of the configuration started or stopped a worker, or failed to start it."""
        self._add("restart", {"part": "worker", "model": model, "state": state, "text": text[:_MAX_TEXT]})

    def sample(self) -> None:
        """Takes one sample now, and records what has changed since the last one."""
        status, recorder = self._status, self._recorder
        status.dispatcher.sync_engine_leases()
        now = recorder.records.clock.now()
        elapsed = max(1e-3, to_seconds(Duration(now - self._sampled_at)))
        self._sampled_at = now
        self._record_changes()
        owners, classes = self._owners_and_classes(now)
        self._add(
            "sample",
            {
                "pool_bytes": status.ledger.capacity,
                "withheld_bytes": status.monitor.withheld if status.monitor else 0,
                "owners": owners,
                "classes": classes,
                "device": self._device_shares(elapsed),
                "calibration": self._calibration(),
                "faults": self._faults,
                "config_version": self._version.number,
            },
        )

    def _device_shares(self, elapsed: float) -> dict[str, float]:
        """Shares of the device time since the last sample, which took so many seconds; at most 1 together.

        A step or a pass is counted when it ends, so more may end in a second than fits into it: the excess is
        of the time before, and is shown in the next second.
        """
        counted = self._status.metrics.device_time
        pending = {owner: counted[owner] - self._shown_seconds[owner] for owner in Owner}
        fitting = min(1.0, elapsed / max(1e-9, sum(pending.values())))
        shown = {owner: fitting * pending[owner] for owner in Owner}
        for owner in Owner:
            # Two engines of one owner may count more than the time that passes.
            left = min(_MOST_PENDING_SECONDS, pending[owner] - shown[owner])
            self._shown_seconds[owner] = counted[owner] - left
        # Rounded down, so that the sum is at most 1.
        return {owner.value: int(1e4 * shown[owner] / elapsed) / 1e4 for owner in Owner}

    def _sample_or_fail(self) -> None:
        try:
            self.sample()
        except Exception as error:
            self._health.failed(error)
        else:
            self._health.succeeded()

    def _add(self, kind: str, fields: Mapping[str, object]) -> None:
        records = self._recorder.records
        records.add(kind, records.clock.now(), fields)

    def _about(self) -> dict[str, object]:
        classes = list(self._version.classes.values())[:_MAX_CLASSES]
        return {
            "target": TARGET,
            "models": {
                Owner.LLM.value: list(self._status.generators)[:_MAX_CLASSES],
                Owner.EMBEDDING.value: list(self._status.encoders)[:_MAX_CLASSES],
            },
            "classes": {
                each.name: {
                    "priority": each.priority,
                    "sheddable": each.sheddable,
                    "objectives_ms": {
                        name: to_milliseconds(value)
                        for name, value in asdict(each.slo).items()
                        if value is not None
                    },
                }
                for each in classes
            },
        }

    def _owners_and_classes(self, now: Instant) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
        status = self._status
        # Counted by maps in C, since loops over 1,000 requests take most of a sample.
        tickets = status.dispatcher.tickets()
        names = list(map(_class_name, tickets))
        has_lease = [ticket.lease is not None for ticket in tickets]
        leased = dict(
            zip(map(_request_id, compress(tickets, has_lease)), compress(names, has_lease), strict=True)
        )
        present, running = Counter(names), Counter(leased.values())
        held = self._held_by_class(leased)
        owners: dict[str, object] = {
            owner.value: {**self._owner(owner), "held_by_class": held[owner]} for owner in Owner
        }
        windows = self._windows(now)
        first_tokens = self._recorder.take_first_tokens()
        classes: dict[str, dict[str, object]] = {}
        for name in self._shown_classes():
            classes[name] = {"waiting": present[name] - running[name], "running": running[name]}
            classes[name] |= {key: of[name].to_json() for key, of in windows.items() if name in of}
            if (found := first_tokens.get(name)) is not None:
                classes[name] |= {
                    "first_tokens": found.count,
                    "ttft_ms": round(found.actual_ms / found.count, 1),
                    "predicted_ttft_ms": round(found.predicted_ms / found.count, 1),
                }
        return owners, classes

    def _shown_classes(self) -> list[str]:
        return list(self._version.classes)[:_MAX_CLASSES]

    def _held_by_class(self, leased: Mapping[str, str]) -> dict[Owner, dict[str, int]]:
        """Bytes that the leases of each class demand, by owner; a class without a lease is absent.

        `leased` has the class of each request with a lease, by its id.
        """
        held: dict[Owner, dict[str, int]] = {}
        for owner in Owner:
            sizes, of_class = self._status.ledger.demand_by_request(owner), defaultdict[str, int](int)
            for name, size in zip(map(leased.__getitem__, sizes), sizes.values(), strict=True):
                of_class[name] += size
            held[owner] = {name: of_class[name] for name in self._shown_classes() if name in of_class}
        return held

    def attainment(self) -> dict[str, dict[str, object]]:
        """Requests that met their objectives and that ended, and the burn rate, by class and window.

        A class of which no request has ended is absent.
        """
        windows = self._windows(self._recorder.records.clock.now())
        names = {name for counts in windows.values() for name in counts}
        return {
            name: {key: of[name].to_json() for key, of in windows.items() if name in of}
            for name in sorted(names)
        }

    def _windows(self, now: Instant) -> dict[str, Mapping[str, Attained]]:
        attainment = self._recorder.attainment
        return {name: attainment.within(length, now) for name, length in WINDOWS.items()}

    def _owner(self, owner: Owner) -> dict[str, float]:
        status, ledger = self._status, self._status.ledger
        quota, controller = ledger.quota(owner), status.quota_controller
        owned = quota if controller is None else controller.owned[owner]
        usable = quota if controller is None else controller.usable[owner]
        return {
            "quota_bytes": quota,
            "owned_bytes": owned,
            "lent_bytes": max(0, owned - usable),
            "held_bytes": ledger.held(owner),
            "deficit_bytes": ledger.deficit(owner),
            "shared_prefix_bytes": status.dispatcher.prefixes.shared_bytes() if owner is Owner.LLM else 0,
            "waiting": len(status.dispatcher.queued(owner)),
            "running": ledger.count(owner),
            "urgency": 0.0 if controller is None else round(controller.urgency[owner], 4),
        }

    def _calibration(self) -> dict[str, dict[str, object]]:
        """Coverage of the 0.9 quantile and mean absolute error of each predictor, by class or by level.

        And of each model of the device, see `_device_calibration`.
        """
        quotas, ttft = self._status.quota_controller, self._status.dispatcher.ttft.calibration
        errors = ttft.mean_absolute_error()
        judged: dict[str, dict[str, object]] = {
            "ttft": {
                "coverage": _rounded(ttft.coverage()),
                "error": _rounded({name: error / 1_000 for name, error in errors.items()}),
            }
        }
        if (lengths := calibration_of(self._status.lengths)) is not None:
            coverage, error = lengths.coverage(), lengths.mean_absolute_error()
            judged["length"] = {"coverage": _rounded(coverage), "error": _rounded(error)}
        if quotas is not None:
            judged["embedding_load"] = {"coverage": _rounded(load_coverage(quotas))}
        return judged | self._device_calibration()

    def _device_calibration(self) -> dict[str, dict[str, object]]:
        """Time over expected time, and relative error, of engine steps and of embedding passes, by model."""
        status, estimators = self._status, self._status.dispatcher.pace_estimators
        steps, passes = estimators.llm.steps.calibration, estimators.embedding.calibration_of
        found = {
            "step_time": dict.fromkeys(status.generators, steps),
            "pass_time": {model: passes(model) for model in status.encoders},
        }
        return {
            kind: {
                "ratio": _rounded({name: r for name, each in of.items() if (r := each.ratio) is not None}),
                "error": _rounded({name: e for name, each in of.items() if (e := each.error) is not None}),
            }
            for kind, of in found.items()
            if of
        }

    def _moved(
        self, before: Mapping[Owner, int], after: Mapping[Owner, int], urgency: Mapping[Owner, float]
    ) -> None:
        size = max(abs(after[owner] - before[owner]) for owner in Owner)
        merged = self._moves
        if merged is None:
            self._moves = MergedMoves(before, after, urgency, size, 1)
            return
        merged.after = after
        merged.count += 1
        if size > merged.largest:
            merged.largest, merged.urgency = size, urgency

    def _record_changes(self) -> None:
        if (moves := self._moves) is not None:
            self._moves = None
            fields: dict[str, object] = {"moves": moves.count, "largest_bytes": moves.largest}
            for key, values in (("from", moves.before), ("to", moves.after), ("urgency", moves.urgency)):
                fields[key] = {owner.value: values[owner] for owner in Owner}
            self._add("quota", fields)
        restarts = self._restarts | self._worker_restarts()
        for model, count in restarts.items():
            if count > self._restarts.get(model, 0):
                self._add("restart", {"part": "worker", "model": model, "state": "up"})
        self._restarts = restarts
        faults = {name: text[:_MAX_TEXT] for name, text in self._faults_now().items()}
        for name in faults.keys() - self._faults.keys():
            self._add("fault", {"part": name, "state": "began", "text": faults[name]})
        for name in self._faults.keys() - faults.keys():
            self._add("fault", {"part": name, "state": "ended", "text": self._faults[name]})
        self._faults = faults

    def _worker_restarts(self) -> dict[str, int]:
        """Of the workers that compute. A failed restart is counted too, and shown once one has succeeded."""
        return {each.model: each.restarts for each in self._status.encoders.values() if each.down is None}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _differences(
    before: Mapping[str, object], after: Mapping[str, object], path: str = ""
) -> Iterable[tuple[str, list[str]]]:
    """The changed keys as dotted paths, each with its former and its new value as text."""
    for key in sorted({*before, *after}):
        was, now = before.get(key), after.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, f"{path}{key}.")
        elif was != now:
            yield f"{path}{key}", ["none" if value is None else str(value)[:100] for value in (was, now)]
