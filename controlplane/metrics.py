"""Prometheus series of the service; labels are enums and configured names, never request ids."""

from collections.abc import Collection, Iterable

from controlplane.core.clock import to_seconds
from controlplane.core.decision import Outcome, Reason
from controlplane.core.request import Kind, Owner, Request, Timeline
from controlplane.core.slo import ServiceClass
from controlplane.metric_series import Series, SeriesRegistry

# vLLM's buckets, so that its dashboards need only another prefix.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LONG = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
# Up to the largest rerank request, whose pairs together have at most `server.limits.max_pair_tokens`.
_TOKENS = tuple(4**power for power in range(12))

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
    *(
        ("EVICT", why)
        for why in (
            Reason.NEVER_FITS, Reason.SLO_UNATTAINABLE, Reason.QUEUE_TIMEOUT, Reason.SHUTTING_DOWN,
        )
    ),
)  # fmt: skip
# Embeddings have no TPOT and do not preempt, and may be rejected for generations; while their worker restarts
# they wait or fail.
DECISIONS = {
    Kind.GENERATE: (
        *_OF_EITHER_KIND,
        ("ADMIT_WITH_PREEMPTION", "none"),
        ("DEFER", Reason.TPOT_GUARD),
        ("REJECT", Reason.ENGINE_DOWN),
    ),
    Kind.EMBED: (*_OF_EITHER_KIND, ("REJECT", Reason.DEVICE_TIME)),
}
UNREAD = "unread"
"""The value of `class` for requests that were rejected before they were parsed: it is in their body."""
_OBJECTIVES = {Kind.GENERATE: ("ttft", "tpot", "e2e", "gap"), Kind.EMBED: ("ttft", "e2e")}


class Metrics(SeriesRegistry):
    """All series of one service."""

    def __init__(self, classes: Collection[ServiceClass] = (), kinds: Collection[Kind] = tuple(Kind)) -> None:
        """Creates every counter of these classes and kinds at 0, so that `rate` counts the first event."""
        super().__init__()
        self.device_time = dict.fromkeys(Owner, 0.0)
        self.handover_time = 0.0
        self._add_requests()
        self._add_gate()
        self._add_memory()
        self._add_engines()
        self._add_forecasts()
        self._kinds = tuple(kinds)
        for kind in kinds:
            self._outcomes.labels(UNREAD, kind, Outcome.REJECTED)
            for decided in DECISIONS[kind]:
                self._decisions.labels(kind, *decided)
        self.add_classes(classes)

    def add_classes(self, classes: Iterable[ServiceClass]) -> None:
        """Creates the counters of these classes."""
        for service_class in classes:
            for kind in self._kinds:
                self._start_at_zero(service_class, kind)

    def _start_at_zero(self, service_class: ServiceClass, kind: Kind) -> None:
        name = service_class.name
        for outcome in Outcome:
            self._outcomes.labels(name, kind, outcome)
        for objective in _OBJECTIVES[kind]:
            if getattr(service_class.slo, objective) is not None:
                self._attained.labels(name, kind, objective)
                self._missed.labels(name, kind, objective)
        if kind is Kind.GENERATE:
            for counter in (self._preemptions, self._prefix_cache_queries, self._prefix_cache_hits):
                counter.labels(name)

    def _add_requests(self) -> None:
        labels = ("class", "kind")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival at the host to the first token.", labels, _TTFT
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per output token of a request after its first token.", labels, _TPOT,
        )  # fmt: skip
        self._gap = self._histogram(
            "longest_token_gap_seconds", "Longest time between two output tokens of a request.", labels, _TTFT
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival at the host to the end.", labels, _LONG
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time from arrival at the host to dispatch to the engine.",
            labels, _LONG,
        )  # fmt: skip
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt or input tokens of a finished request.", labels, _TOKENS
        )
        self._output = self._histogram(
            "request_generation_tokens",
            "Output tokens of a finished request; of several choices, of the longest.",
            labels,
            _TOKENS,
        )
        self._outcomes = self._counter(
            "requests",
            "Ended requests by outcome: met or late (finished, with or without every objective), rejected "
            "(never accepted), evicted (accepted, then dropped by the gate), aborted (the client left, "
            "or sent parameters that the engine does not serve), failed. "
            "The class is `unread` for requests rejected before they were parsed.",
            (*labels, "outcome"),
        )
        self._explored = self._counter(
            "explored",
            "Requests served although they were to be rejected as slo_unattainable (admission.explore), by "
            "outcome; the share that is late is that of right rejections.",
            ("class", "outcome"),
        )
        self._shed = self._counter(
            "requests_shed",
            "Requests rejected before the gate, because the event loop was late or large requests took the "
            "memory for them.",
            (),
        )
        self._attained = self._counter(
            "slo_attained", "Finished requests that met an objective.", (*labels, "objective")
        )
        self._missed = self._counter(
            "slo_missed", "Finished requests that missed an objective.", (*labels, "objective")
        )

    def _add_gate(self) -> None:
        self._decisions = self._counter(
            "decisions",
            "Decisions of the gate and their reasons; DEFER counts a request once, with its first reason, "
            "and EVICT one that was admitted before.",
            ("kind", "decision", "reason"),
        )
        self._preemptions = self._counter("preemptions", "Requests preempted by the gate.", ("class",))
        self._prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens of requests that the engine started.", ("class",)
        )
        self._prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that the engine had in its prefix cache.", ("class",)
        )
        self.config_version = self._series(
            Series("config_version", "Number of the configuration in force.", None, is_total=False)
        )
        self.predicted_utilisation = self._series(
            Series(
                "predicted_utilisation",
                "Largest part in use or predicted of memory, of slots, or of a TTFT objective by the work "
                "before a new request; at 1 an objective is at risk.",
                None,
                is_total=False,
            )
        )
        self.log_rows = self._total(
            "decision_log_rows_total", "Rows of the decision log: written, or dropped (see the log).", "what"
        )
        self.traced_requests = self._total(
            "traced_requests_total", "Requests whose spans were exported, or dropped (see the log).", "what"
        )
        self.running = self._gauge("requests_running", "Requests with an open lease.", "owner")
        self.waiting = self._gauge("requests_waiting", "Requests that wait at the gate.", "owner")

    def _add_memory(self) -> None:
        self.quota_bytes = self._gauge(
            "quota_bytes", "Memory quota in force, lending included, in bytes.", "owner"
        )
        self.quota_before_lending = self._gauge(
            "quota_before_lending_bytes",
            "Memory quota before lending and borrowing, in bytes; only if quotas change at run time.",
            "owner",
        )
        self.held_bytes = self._gauge("held_bytes", "Bytes held by leases.", "owner")
        self.deficit_bytes = self._gauge(
            "deficit_bytes", "Bytes that leases need beyond what the quota grants them.", "owner"
        )
        self.predicted_lease_bytes = self._gauge(
            "predicted_lease_bytes", "Sum of the predicted final sizes of all open leases, in bytes.", "owner"
        )
        self.urgency = self._gauge(
            "urgency", "Urgency of waiting and running requests, which moves the quotas.", "owner"
        )
        self.quota_moves = self._total("quota_moves_total", "Changes of the memory quotas.")
        self.quota_failures = self._total(
            "quota_failures_total", "Controller ticks that could not apply their quotas.", "fault"
        )
        self.reclaimed_bytes = self._total(
            "reclaimed_bytes_total", "Bytes preempted because the other owner needed them.", "owner"
        )
        self.device_bytes = self._gauge(
            "device_bytes",
            "Device memory: total, free, ours (Tandem's processes), others, least_free and most_ours since "
            "the start, disagreement (use beyond the leases), withheld (kept out of the quotas for it), "
            "allocator (cached by the workers' allocators).",
            "what",
        )
        self.device_alerts = self._total(
            "device_alerts_total", "Times that device use began to exceed what leases explain."
        )
        self.device_failures = self._total(
            "device_read_failures_total", "Failed readings of the device's memory."
        )

    def _add_engines(self) -> None:
        self.used_bytes = self._gauge(
            "engine_used_bytes", "KV-cache bytes in use, as the engine reports.", "owner"
        )
        self.balloon_bytes = self._gauge(
            "engine_balloon_bytes", "KV-cache bytes withheld from the engine, for other owners.", "owner"
        )
        self.device_seconds = self._total(
            "device_seconds_total",
            "Time of engine steps and embedding passes, each without what the other adds to it.",
            "owner",
        )
        self.device_handover = self._total(
            "device_handover_seconds_total",
            "Time that embedding passes took beyond their computation, queueing in the worker excluded.",
        )
        self.engine_running = self._gauge(
            "engine_requests_running", "Requests in the engine's running batch.", "owner"
        )
        self.engine_waiting = self._gauge(
            "engine_requests_waiting", "Requests in the engine's waiting queue.", "owner"
        )
        self.engine_preemptions = self._total(
            "engine_preemptions_total", "Preemptions that the engine reports.", "owner"
        )
        self.engine_recompute_tokens = self._total(
            "engine_recompute_tokens_total",
            "Tokens that preemptions dropped from the KV cache; absent if the engine does not report them.",
            "owner",
        )
        self.engine_stalls = self._total(
            "engine_stalls_total", "Times that the watchdog killed an unresponsive engine.", "owner"
        )
        self.engine_restarts = self._total(
            "engine_restarts_total", "Restarts of the LLM engine after its death, failed attempts included."
        )
        self.embedding_restarts = self._total(
            "embedding_restarts_total", "Restarts of embedding workers, failed attempts included."
        )
        self.out_of_memory = self._total(
            "embedding_out_of_memory_total", "Embedding batches split because the device had no memory."
        )
        self.batch_tokens = self._histogram(
            "embedding_batch_tokens", "Padded tokens of an embedding batch.", (), _TOKENS
        )

    def _add_forecasts(self) -> None:
        self._predictor_failures = self._counter(
            "predictor_failures", "Exceptions in a predictor; a default replaces its value.", ("subject",)
        )
        self.length_coverage = self._gauge(
            "length_forecast_coverage",
            "Share of outputs no longer than the forecast's 0.9 quantile; 0.9 is calibrated.",
            "class",
        )
        self.length_error = self._gauge(
            "length_forecast_error_tokens", "Mean absolute error of the median length forecast.", "class"
        )
        self.length_bias = self._gauge(
            "length_forecast_bias_tokens", "Mean of median length forecast minus actual length.", "class"
        )
        self.length_pinball = self._gauge(
            "length_forecast_pinball_tokens", "Mean pinball loss over the forecast quantiles.", "class"
        )
        self.length_drift = self._gauge(
            "length_forecast_drift",
            "Mean log ratio of actual to forecast length of recent outputs, minus that of the whole window.",
            "class",
        )
        self.length_out_of_coverage = self._gauge(
            "length_forecast_out_of_coverage",
            "1 while too many outputs exceed the 0.9 quantile and forecasts are widened, otherwise 0.",
            "class",
        )
        self.ttft_coverage = self._gauge(
            "ttft_forecast_coverage",
            "Share of TTFTs no longer than the forecast's 0.9 quantile; 0.9 is calibrated.",
            "class",
        )
        self.ttft_error = self._gauge(
            "ttft_forecast_error_seconds", "Mean absolute error of the median TTFT forecast.", "class"
        )
        self.tpot_forecast = self._gauge(
            "tpot_forecast_seconds", "Forecast time to the next output token, by quantile level.", "level"
        )
        self.forecast_tokens = self._gauge(
            "embedding_forecast_tokens",
            "Embedding tokens forecast for the next window, by quantile level.",
            "level",
        )
        self.forecast_coverage = self._gauge(
            "embedding_forecast_coverage",
            "Share of past windows within the forecast, by quantile level.",
            "level",
        )

    def count_decision(self, kind: Kind, decision: str, reason: str = "none") -> None:
        """Counts one decision of the gate."""
        self._decisions.labels(kind, decision, reason).inc()

    def count_shed(self, kind: Kind) -> None:
        """Counts one request that was rejected before it was parsed, by the kind of its path."""
        self._shed.inc()
        self._outcomes.labels(UNREAD, kind, Outcome.REJECTED).inc()

    def declare_predictor(self, subject: str) -> None:
        """Starts the failure counter of a predictor at 0."""
        self._predictor_failures.labels(subject)

    def count_predictor_failure(self, subject: str) -> None:
        """Counts one failure of a predictor."""
        self._predictor_failures.labels(subject).inc()

    def count_preemption(self, class_name: str) -> None:
        """Counts one preemption by the gate."""
        self._preemptions.labels(class_name).inc()

    def count_prompt_tokens(self, request: Request, cached_tokens: int) -> None:
        """Counts the prompt of a request that the engine started; recompute is not counted."""
        self._prefix_cache_queries.labels(request.service_class.name).inc(request.prompt_tokens)
        self._prefix_cache_hits.labels(request.service_class.name).inc(cached_tokens)

    def count_explored(self, request: Request, outcome: Outcome) -> None:
        """Counts the outcome of a request that was served although it should have been rejected."""
        self._explored.labels(request.service_class.name, outcome).inc()

    def count_outcome(self, request: Request, timeline: Timeline, outcome: Outcome) -> None:
        """Counts one ended request; latencies and objectives only if it finished."""
        labels = (request.service_class.name, request.kind)
        self._outcomes.labels(*labels, outcome).inc()
        if timeline.queue is not None:
            self._queue.labels(*labels).observe(to_seconds(timeline.queue))
        if outcome not in (Outcome.MET, Outcome.LATE):
            return
        self._prompt.labels(*labels).observe(request.prompt_tokens)
        if request.kind is Kind.GENERATE:
            self._output.labels(*labels).observe(timeline.output_tokens)
        histograms = {"ttft": self._ttft, "tpot": self._tpot, "e2e": self._e2e, "gap": self._gap}
        for objective, took in timeline.measured(request.kind).items():
            if took is not None:
                histograms[objective].labels(*labels).observe(to_seconds(took))
        for objective, kept in timeline.objectives_met(request.slo).items():
            (self._attained if kept else self._missed).labels(*labels, objective).inc()
