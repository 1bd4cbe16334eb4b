"""What does an operator watch? Prometheus series whose labels are enums and configured names, never ids."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from controlplane.core.clock import to_seconds
from controlplane.core.decision import Outcome, Reason
from controlplane.core.request import Kind, Request, Timeline
from controlplane.core.slo import ServiceClass

# vLLM's own buckets, so that its dashboards need a new prefix only.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LONG = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536)

_OF_EITHER_KIND = (
    ("ADMIT", "none"),
    *(("DEFER", why) for why in (Reason.NO_MEMORY, Reason.NO_SLOT, Reason.BEHIND_OTHERS)),
    *(
        ("REJECT", why)
        for why in (
            Reason.NEVER_FITS, Reason.SLO_UNATTAINABLE, Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT,
            Reason.RATE_LIMITED, Reason.SHUTTING_DOWN,
        )
    ),
)  # fmt: skip
# Embeddings have no pace to keep, and preempt nobody.
DECISIONS = {
    Kind.GENERATE: (*_OF_EITHER_KIND, ("ADMIT_WITH_PREEMPTION", "none"), ("DEFER", Reason.NO_PACE)),
    Kind.EMBED: _OF_EITHER_KIND,
}
_OBJECTIVES = {Kind.GENERATE: ("ttft", "tpot", "e2e"), Kind.EMBED: ("ttft", "e2e")}

# When a series began doubles their number, and the old text format has no word for it but one more gauge.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Series:
    """One whose values are kept elsewhere and are read when Prometheus asks; what is not said then is absent,
    since a last value would look alive. `is_total`: it only grows, and its name ends in `_total`."""

    name: str
    text: str
    label: str | None
    is_total: bool

    def family(self, values: Mapping[str, float] | float) -> GaugeMetricFamily | CounterMetricFamily:
        kind = CounterMetricFamily if self.is_total else GaugeMetricFamily
        family = kind(f"tandem_{self.name}", self.text, labels=[self.label] if self.label else [])
        for label, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
            family.add_metric([] if label is None else [label], value)
        return family


Readings = Mapping[Series, Mapping[str, float] | float]
"""Values by label; a number where the series has none."""


class Metrics:
    """One registry a service, so that several can live in one process."""

    def __init__(self, classes: Collection[ServiceClass] = (), kinds: Collection[Kind] = tuple(Kind)) -> None:
        """What can be counted of these stands at 0 from the start: `rate` sees no first event of a series
        that begins with it."""
        self.registry = CollectorRegistry()
        self._read_elsewhere: list[Series] = []
        self._readings: Readings = {}
        self.registry.register(self)
        per_class = ("class", "kind")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_{name}", text, per_class, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival at the gate to first token", _TTFT)
        self._tpot = histogram("time_per_output_token_seconds", "Mean after the first token", _TPOT)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival at the gate to the end", _LONG)
        self._queue = histogram("request_queue_time_seconds", "Arrival at the gate to dispatch", _LONG)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        self._outcomes = counter("requests", "Requests by how they ended", ("class", "kind", "outcome"))
        self._attained = counter(
            "slo_attained", "Finished requests that kept an objective", ("class", "kind", "objective")
        )
        self._missed = counter(
            "slo_missed", "Finished requests that broke an objective", ("class", "kind", "objective")
        )
        self._decisions = counter("decisions", "Decisions of the gate", ("kind", "decision", "reason"))
        self._unlearned = counter(
            "learning_failures", "Forecasts and lessons that failed; requests went on without", ("subject",)
        )
        self._preemptions = counter("preemptions", "Requests preempted by the gate", ("class",))
        self._read = counter("prefix_cache_queries", "Prompt tokens of started requests", ("class",))
        self._cached = counter("prefix_cache_hits", "Those that the engine had in its cache", ("class",))
        self._add_sharing()
        self._add_engines()
        self.quota_bytes = self._gauge("quota_bytes", "Nominal share of the pool", "owner")
        self.held_bytes = self._gauge("held_bytes", "Bytes held by leases", "owner")
        self.deficit_bytes = self._gauge("deficit_bytes", "Bytes leased beyond the ceiling", "owner")
        self.reserved_bytes = self._gauge("reserved_bytes", "Predicted peak of the open leases", "owner")
        self.running = self._gauge("requests_running", "Requests with an open lease", "owner")
        self.waiting = self._gauge("requests_waiting", "Requests deferred at the gate", "owner")
        self._forecasts()
        self.batch_tokens = Histogram(
            "tandem_embedding_batch_tokens", "Padded tokens of an embedding batch",
            buckets=_TOKENS, registry=self.registry,
        )  # fmt: skip
        for kind in kinds:
            for decided in DECISIONS[kind]:
                self._decisions.labels(kind, *decided)
            for service_class in classes:
                self._stand_at_zero(service_class, kind)

    def _stand_at_zero(self, service_class: ServiceClass, kind: Kind) -> None:
        name = service_class.name
        for outcome in Outcome:
            self._outcomes.labels(name, kind, outcome)
        for objective in _OBJECTIVES[kind]:
            if getattr(service_class.slo, objective) is not None:
                self._attained.labels(name, kind, objective)
                self._missed.labels(name, kind, objective)
        if kind is Kind.GENERATE:
            for of_answers in (self._preemptions, self._read, self._cached):
                of_answers.labels(name)

    def _add_engines(self) -> None:
        self.used_bytes = self._gauge("engine_used_bytes", "Bytes in use as the engine reports them", "owner")
        self.ceded_bytes = self._gauge(
            "engine_ceded_bytes", "Bytes of its cache that the engine leaves to others", "owner"
        )
        self.engine_running = self._gauge("engine_requests_running", "Requests that the engine runs", "owner")
        self.engine_waiting = self._gauge(
            "engine_requests_waiting", "Requests that wait inside the engine", "owner"
        )
        self.engine_preemptions = self._total(
            "engine_preemptions_total", "Preemptions that the engine reports", "owner"
        )
        self.engine_recompute_tokens = self._total(
            "engine_recompute_tokens_total",
            "Tokens whose cache was lost to them, where the engine says",
            "owner",
        )
        self.stall_count = self._total(
            "engine_stalls_total", "Times an engine was taken for dead: it left its work undone", "owner"
        )
        self.restarts = self._total(
            "embedding_restarts_total", "Times the process of an embedding model was started anew"
        )
        self.out_of_memory = self._total(
            "embedding_out_of_memory_total", "Embedding batches that found no memory and were cut"
        )

    def _forecasts(self) -> None:
        self.coverage = self._gauge(
            "length_forecast_coverage", "Share of answers within the forecast's 0.9 quantile", "class"
        )
        self.ttft_coverage = self._gauge(
            "ttft_forecast_coverage", "Share of first tokens within the forecast's 0.9 quantile", "class"
        )
        self.ttft_error = self._gauge(
            "ttft_forecast_error_seconds", "Mean absolute error of the forecast median", "class"
        )
        self.tpot_forecast = self._gauge(
            "tpot_forecast_seconds", "Time to an answer's next token, from the engine's steps", "level"
        )
        self.length_error = self._gauge(
            "length_forecast_error_tokens", "Mean absolute error of the forecast median", "class"
        )
        self.length_bias = self._gauge(
            "length_forecast_bias_tokens", "Mean of forecast median minus answer", "class"
        )
        self.length_pinball = self._gauge(
            "length_forecast_pinball_tokens", "Mean pinball loss over the levels stated", "class"
        )
        self.length_drift = self._gauge(
            "length_forecast_drift", "Log ratio of answer to forecast, lately minus on average", "class"
        )
        self.widened = self._gauge(
            "length_forecast_widened", "1 while forecasts are out of coverage and widen", "class"
        )

    def _gauge(self, name: str, text: str, label: str) -> Series:
        return self._series(Series(name, text, label, is_total=False))

    def _total(self, name: str, text: str, label: str | None = None) -> Series:
        return self._series(Series(name, text, label, is_total=True))

    def _series(self, series: Series) -> Series:
        self._read_elsewhere.append(series)
        return series

    def _add_sharing(self) -> None:
        self.device_bytes = self._gauge(
            "device_bytes", "Memory as the device says, and how far it disagrees with the ledger", "what"
        )
        self.device_alerts = self._total("device_alerts_total", "Disagreements with the ledger that began")
        self.device_failures = self._total("device_failures_total", "Readings of the device that failed")
        self.owned_bytes = self._gauge(
            "owned_bytes", "Share of the pool before lending, where quotas move", "owner"
        )
        self.urgency = self._gauge("urgency", "Urgency that moves the quotas", "owner")
        self.quota_moves = self._total("quota_moves_total", "Changes of the quotas")
        self.quota_failures = self._total(
            "quota_failures_total", "Ticks that could not put their quotas in force", "fault"
        )
        self.reclaimed_bytes = self._total(
            "reclaimed_bytes_total", "Bytes preempted for what the other side asked for", "owner"
        )
        self.forecast_tokens = self._gauge(
            "embedding_forecast_tokens", "Embedding tokens forecast for the next window", "level"
        )
        self.forecast_coverage = self._gauge(
            "embedding_forecast_coverage", "Share of windows within the forecast quantile", "level"
        )

    def decided(self, kind: Kind, decision: str, reason: str = "none") -> None:
        self._decisions.labels(kind, decision, reason).inc()

    def may_not_learn(self, subject: str) -> None:
        self._unlearned.labels(subject)

    def not_learned(self, subject: str) -> None:
        self._unlearned.labels(subject).inc()

    def preempted(self, class_name: str) -> None:
        self._preemptions.labels(class_name).inc()

    def read(self, request: Request, cached_tokens: int) -> None:
        """The engine has begun with it; what it reads again after a preemption is not counted."""
        self._read.labels(request.service_class.name).inc(request.prompt_tokens)
        self._cached.labels(request.service_class.name).inc(cached_tokens)

    def ended(self, request: Request, timeline: Timeline, outcome: Outcome) -> None:
        labels = (request.service_class.name, request.kind)
        self._outcomes.labels(*labels, outcome).inc()
        if timeline.queue is not None:
            self._queue.labels(*labels).observe(to_seconds(timeline.queue))
        if outcome not in (Outcome.MET, Outcome.LATE):
            return
        self._prompt.labels(*labels).observe(request.prompt_tokens)
        if request.kind is Kind.GENERATE:
            self._output.labels(*labels).observe(timeline.output_tokens)
        histograms = {"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e}
        for objective, took in timeline.measured().items():
            if took is not None:
                histograms[objective].labels(*labels).observe(to_seconds(took))
        for objective, kept in timeline.kept(request.slo).items():
            (self._attained if kept else self._missed).labels(*labels, objective).inc()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """What is read elsewhere, for the registry."""
        return [series.family(self._readings.get(series, {})) for series in self._read_elsewhere]

    def exposition(self, readings: Readings) -> bytes:
        """Prometheus text, with what was read just now."""
        self._readings = readings
        return generate_latest(self.registry)
