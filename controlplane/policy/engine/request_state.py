"""How far is a request that the engine has, what does it still need, and can its promise still be kept?

A gap is the time between two tokens as its reader sees them. `gap` bounds it where it is stated; TPOT
is a mean, so being ahead of it is slack. Remaining memory-time is what serving it to the end still
takes: token-steps, now until its predicted last token.
"""

from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, between, scaled
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Request
from controlplane.core.view import Pace, Running


@dataclass(eq=False, slots=True)
class RequestState:
    """Mutable; its only writers are the host and the crowd that it is in, which knows better what each step
    changes until it is asked for it. `predicted` output tokens may be wrong by any factor; `name` is what the
    caller calls the request; `gap` is the longest pause that is promised after the first token, None for no
    promise."""

    request: Request
    predicted: int
    name: str
    forecast: LengthForecast | None = None
    gap: Duration | None = None
    first_token: Instant | None = None
    last_token: Instant | None = None
    preemptions: int = 0
    is_guess: bool = False
    """Nobody predicted its length: `predicted` is only the limit."""
    is_missed: bool = False
    """The first token came too late, or a gap was longer than promised."""
    per_block: int | None = None
    """Its tokens that a block holds; None for as many as of keys and values."""
    held: int = 0
    """Blocks, when the host last looked at those that run; of who waits it says nothing."""
    tokens: int = field(init=False)
    """What must be in the cache before the next token: the prompt, and the answer so far."""
    priority: int = field(init=False)
    """Of its class."""
    first_due: Instant | None = field(init=False)
    """When the first token must be out."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = request.prompt_tokens
        self.priority = request.service_class.priority
        self.first_due = request.slo.first_token_deadline(request.arrival)

    def set_forecast(self, forecast: LengthForecast) -> None:
        """The whole answer is now thought to be so long."""
        self.forecast, self.is_guess = forecast, False
        self.predicted = max(1, min(round(forecast.mean), self.request.max_output_tokens))

    @property
    def done(self) -> int:
        """Tokens of its answer that have appeared."""
        return self.tokens - self.request.prompt_tokens

    def began(self, at: Instant) -> None:
        """Its first token appeared."""
        self.first_token = at
        self.is_missed = self.first_due is not None and at > self.first_due

    def stamp(self, now: Instant, tokens: int) -> None:
        """`tokens` more have appeared."""
        if self.last_token is None:
            self.began(now)
        elif self.gap is not None and now - self.last_token > self.gap:
            self.is_missed = True
        self.last_token = now
        self.tokens += tokens

    def remaining(self) -> int:
        """Tokens expected to come, at least 1, given that the answer went on so far. Where only a number was
        predicted, one that outran it is given a quarter more of what it has: it is known to be long, not
        that it is nearly over."""
        forecast, done, predicted = self.forecast, self.done, self.predicted
        if forecast is not None:
            left = round(forecast.expected_remaining(done))
        else:
            left = predicted - done if done < predicted else max(16, done // 4)
        return max(1, min(left, self.request.max_output_tokens - done))

    def memory_time(self) -> float:
        """Token-steps from now to the end."""
        return memory_time(self.tokens, self.remaining())

    def deadline(self) -> Instant | None:
        """Of the next token; None if nothing is promised."""
        request, first, last = self.request, self.first_token, self.last_token
        if first is None or last is None:
            return self.first_due
        if self.gap is not None:
            return Instant(last + self.gap)
        if request.slo.tpot is not None:
            return Instant(first + request.slo.tpot * self.done)
        return None

    def prefill(self, pace: Pace) -> Duration:
        """To compute its cache and the next token from nothing."""
        return Duration(pace.step + scaled(pace.per_prompt_token, self.tokens))

    def cannot_meet_slo(self, now: Instant, work: Duration) -> bool:
        """Whether the promise is broken, or will be since the next token needs `work` more."""
        if self.is_missed:
            return True
        if self.first_token is None:
            return self.first_due is not None and now + work > self.first_due
        # Being behind a mean can be made good; a pause that was too long cannot.
        if self.gap is None or self.last_token is None:
            return False
        return now + work > self.last_token + self.gap

    def as_running(self, now: Instant, held: int, pace: Pace | None) -> Running:
        """As a possible victim that gives `held` back."""
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
    """Of one that has so many tokens, with so many to come."""
    return (tokens + left / 2) * left
