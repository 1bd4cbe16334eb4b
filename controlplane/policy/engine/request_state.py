"""State of one request inside the engine: tokens, forecast, and whether its SLO can still be met.

A gap is the time between two tokens as the client receives them; `RequestState.gap` bounds it where an
objective is stated. TPOT is a mean, so time gained on it is slack. Remaining memory-time is the cost of
serving the request to its end: token-steps from now to its predicted last token.
"""

from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, between, scaled
from controlplane.core.forecast import LengthForecast
from controlplane.core.pool_view import Pace, Running
from controlplane.core.request import Request


@dataclass(eq=False, slots=True)
class RequestState:
    """Mutable state of one request.

    Written by the host; while the request runs, `RunningBatch` holds newer values and writes them back when
    the request is read. `predicted` output tokens may be wrong by any factor. `name` is the engine's request
    id. `gap` is the longest allowed pause after the first token, None without an objective.
    """

    request: Request
    predicted: int
    name: str
    forecast: LengthForecast | None = None
    gap: Duration | None = None
    first_token: Instant | None = None
    last_token: Instant | None = None
    preemptions: int = 0
    is_guess: bool = False
    """There is no forecast: `predicted` is max_tokens."""
    is_missed: bool = False
    """The first token was late, or a gap was longer than allowed."""
    per_block: int | None = None
    """Tokens per block; None for the block size of the KV cache."""
    held: int = 0
    """Blocks held at the host's last update of the running batch; undefined while waiting."""
    tokens: int = field(init=False)
    """Tokens that must be in the cache before the next one: the prompt and the output so far."""
    priority: int = field(init=False)
    """Priority of its service class."""
    first_due: Instant | None = field(init=False)
    """Deadline of the first token."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = request.prompt_tokens
        self.priority = request.service_class.priority
        self.first_due = request.slo.first_token_deadline(request.arrival)

    def set_forecast(self, forecast: LengthForecast) -> None:
        """Replaces the forecast of the total output length."""
        self.forecast, self.is_guess = forecast, False
        self.predicted = max(1, min(round(forecast.mean), self.request.max_output_tokens))

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
        elif self.gap is not None and now - self.last_token > self.gap:
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

    def memory_time(self) -> float:
        """Token-steps from now to the predicted end."""
        return memory_time(self.tokens, self.remaining())

    def deadline(self) -> Instant | None:
        """Deadline of the next token; None without an objective."""
        request, first, last = self.request, self.first_token, self.last_token
        if first is None or last is None:
            return self.first_due
        if self.gap is not None:
            return Instant(last + self.gap)
        if request.slo.tpot is not None:
            return Instant(first + request.slo.tpot * self.done)
        return None

    def prefill(self, pace: Pace) -> Duration:
        """Time to compute the whole cache and the next token."""
        return Duration(pace.step + scaled(pace.per_prompt_token, self.tokens))

    def cannot_meet_slo(self, now: Instant, work: Duration) -> bool:
        """Whether the SLO is missed, or will be because the next token needs `work` more."""
        if self.is_missed:
            return True
        if self.first_token is None:
            return self.first_due is not None and now + work > self.first_due
        # A mean can recover; a pause that was too long cannot.
        if self.gap is None or self.last_token is None:
            return False
        return now + work > self.last_token + self.gap

    def as_running(self, now: Instant, held: int, pace: Pace | None) -> Running:
        """The request as a possible victim that frees `held`."""
        deadline = self.deadline()
        return Running(
            request_id=self.request.id,
            priority=self.priority,
            freed_bytes=held,
            slack=None if deadline is None else between(now, deadline),
            recompute=Duration(0) if pace is None else scaled(pace.per_prompt_token, self.tokens),
            remaining_steps=self.remaining(),
            preemptions=self.preemptions,
        )


def memory_time(tokens: int, left: int) -> float:
    """Token-steps of a request that has `tokens` in the cache and `left` to come."""
    return (tokens + left / 2) * left
