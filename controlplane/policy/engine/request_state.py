"""State of one request inside the engine: tokens, forecast, and whether its SLO can still be met.

`core.deadlines` defines the deadlines. Remaining memory-time is the cost of serving the request to its end:
token-steps from now to its predicted last token.
"""

from dataclasses import dataclass, field

from controlplane.core.clock import NO_TIME, Duration, Instant, between, scaled
from controlplane.core.deadlines import Progress, last_chance, next_token_deadline
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Pace, Running
from controlplane.core.request import Request


@dataclass(eq=False, slots=True)
class RequestState:
    """Mutable state of one request.

    Written by the host; while the request runs, `RunningBatch` holds newer values and writes them back when
    the request is read. `predicted` output tokens may be wrong by any factor.
    """

    request: Request
    predicted: int
    forecast: LengthForecast | None = None
    first_token: Instant | None = None
    last_token: Instant | None = None
    preemptions: int = 0
    is_guess: bool = False
    """There is no forecast: `predicted` is max_tokens."""
    is_missed: bool = False
    """The first token was late, or a gap was longer than allowed."""
    block_tokens: int | None = None
    """Tokens that it stores per block; None for the block size of the KV cache."""
    held: int = 0
    """Blocks that preempting it frees, at the last update of the running batch; undefined while waiting."""
    shared: int = 0
    """Blocks that it uses together with other running requests; while it waits, those it would share."""
    carried: int = 0
    """Part of `shared` that counts as its own in the sum over the running requests; 0 while waiting."""
    cached: int = 0
    """Tokens that need no computation when it starts, or starts again after a preemption."""
    tokens: int = field(init=False)
    """Tokens that must be in the cache before the next one: the prompt and the output so far."""
    has_arrived: bool = field(init=False, default=False)
    """Whether its arrival was counted; vLLM puts a request back that it cannot start yet."""
    priority: int = field(init=False)
    """Priority of its service class."""
    weight: float = field(init=False)
    """Weight of its service class."""
    first_due: Instant | None = field(init=False)
    """Deadline of the first token."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = request.prompt_tokens
        self.priority = request.service_class.priority
        self.weight = request.service_class.weight
        self.first_due = request.first_deadline

    def set_forecast(self, forecast: LengthForecast) -> None:
        """Replaces the forecast of the total output length."""
        self.forecast, self.is_guess = forecast, False
        self.predicted = max(1, min(round(forecast.mean), self.request.max_output_tokens))

    @property
    def pending_since(self) -> Instant:
        """Start of the wait for its next token: its last token, or its arrival."""
        return self.request.arrival if self.last_token is None else self.last_token

    @property
    def done(self) -> int:
        """Output tokens produced so far."""
        return self.tokens - self.request.prompt_tokens

    def record_first_token(self, at: Instant) -> None:
        """Records the first token."""
        self.first_token = at
        self.is_missed = self.first_due is not None and at > self.first_due

    def stamp(self, now: Instant, tokens: int) -> None:
        """Records `tokens` more output tokens."""
        if self.last_token is None:
            self.record_first_token(now)
        elif (gap := self.request.slo.gap) is not None and now - self.last_token > gap:
            self.is_missed = True
        self.last_token = now
        self.tokens += tokens

    def remaining(self) -> int:
        """Expected remaining output tokens, at least 1, given the output so far.

        Without a distribution, a request that outran its predicted length is expected to produce a quarter
        more of its output: it is known to be long, not to be nearly finished.
        """
        forecast, done, predicted = self.forecast, self.done, self.predicted
        if forecast is not None:
            left = round(forecast.expected_remaining(done))
        else:
            left = predicted - done if done < predicted else max(16, done // 4)
        return max(1, min(left, self.request.max_output_tokens - done))

    def likely_total(self, done: int) -> tuple[int, int]:
        """`LengthForecast.likely_total` at `done` tokens; a predicted number is exact until it is outrun."""
        limit = self.request.max_output_tokens
        if self.forecast is not None:
            return self.forecast.likely_total(done, limit)
        if self.is_guess or done >= self.predicted:
            return 0, limit
        return min(self.predicted, limit), min(self.predicted, limit)

    @property
    def progress(self) -> Progress:
        """Progress of the request, from which its deadlines follow."""
        return Progress(self.request.arrival, self.first_token, self.last_token, self.done)

    def deadline(self, step: Duration = NO_TIME) -> Instant | None:
        """Deadline of the next token; None without an objective. `step` is the time of each further token."""
        slo = self.request.slo
        return next_token_deadline(slo, self.progress, 1 if slo.e2e is None else self.remaining(), step)

    def last_chance(self, step: Duration = NO_TIME) -> Instant | None:
        """The time of the next token after which the SLO cannot be met with steps of `step`; None: never."""
        return last_chance(self.request.slo, self.progress, self.likely_total(self.done), step)

    def prefill(self, pace: Pace) -> Duration:
        """Time to compute what is not cached and the next token."""
        return Duration(pace.step + scaled(pace.per_prompt_token, self.tokens - self.cached))

    def cannot_meet_slo(self, now: Instant, work: Duration, step: Duration = NO_TIME) -> bool:
        """Whether the SLO is missed, or will be: the next token needs `work`, each further one `step`."""
        return self.is_missed or ((chance := self.last_chance(step)) is not None and now + work > chance)

    def as_running(self, now: Instant, held: int, pace: Pace) -> Running:
        """The request as a possible victim that frees `held`."""
        deadline = None if self.is_missed else self.deadline(pace.step)
        slack = None if deadline is None else between(now, deadline)
        if slack is not None and slack < 0:
            slack = None if self.cannot_meet_slo(now, NO_TIME, pace.step) else NO_TIME
        return Running(
            request_id=self.request.id,
            priority=self.priority,
            freed_bytes=held,
            slack=slack,
            recompute=scaled(pace.per_prompt_token, self.tokens - self.cached),
            remaining_steps=self.remaining(),
            preemptions=self.preemptions,
            progress=self.progress,
        )


def memory_time(tokens: int, left: int) -> float:
    """Token-steps of a request that has `tokens` in the cache and `left` to come."""
    return (tokens + left / 2) * left
