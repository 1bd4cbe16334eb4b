"""How far is a request that the engine has, what does it still need, and can its promise still be kept?

A gap is the time between two tokens as its reader sees them. `gap` bounds it where it is stated; TPOT
is a mean, so being ahead of it is slack. Remaining memory-time is what serving it to the end still
takes: token-steps, now until its predicted last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, between, scaled
from controlplane.core.forecast import LengthForecast
from controlplane.core.request import Request
from controlplane.core.view import Pace, Running


@dataclass(eq=False, slots=True)
class Progress:
    """Mutable; its only writer is the host. `predicted` output tokens may be wrong by any factor; `name` is
    what the caller calls the request; `gap` is the longest pause that is promised after the first token,
    None for no promise."""

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
    """Of its class. This and what follows are asked for each running request in nearly each step."""
    first_due: Instant | None = field(init=False)
    """When the first token must be out."""
    ends_at: int = field(init=False)
    """Tokens at its predicted end; 0 where a forecast says something else with every token."""
    _left: int = field(init=False)
    """What `remaining` said when it was asked last, at so many tokens."""
    _asked_at: int | None = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = request.prompt_tokens
        self.priority = request.service_class.priority
        self.first_due = request.slo.first_token_deadline(request.arrival)
        predicted = min(self.predicted, request.max_output_tokens)
        self.ends_at = request.prompt_tokens + predicted if self.forecast is None else 0
        self._left, self._asked_at = 1, None

    def foretell(self, forecast: LengthForecast) -> None:
        """The whole answer is now thought to be so long."""
        self.forecast, self.is_guess, self.ends_at, self._asked_at = forecast, False, 0, None
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
        if (left := self.ends_at - self.tokens) > 0:
            return left
        if self._asked_at != self.tokens:
            request, forecast = self.request, self.forecast
            done = self.tokens - request.prompt_tokens
            left = max(16, done // 4) if forecast is None else round(forecast.expected_remaining(done))
            most = request.max_output_tokens - done
            left = left if left < most else most
            self._left = left if left > 1 else 1
            self._asked_at = self.tokens
        return self._left

    def memory_time(self) -> float:
        """Token-steps from now to the end."""
        left = self.remaining()
        return (self.tokens + left / 2) * left

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

    def is_hopeless(self, now: Instant, work: Duration) -> bool:
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


def stamp_all(listed: Sequence[Progress], tokens: Sequence[int], now: Instant) -> None:
    """Those that have more tokens in the cache, or to be put there, than when they were stamped last."""
    for one, present in zip(listed, tokens, strict=True):
        if new := present - one.tokens:
            if one.last_token is None or one.gap is not None:
                one.stamp(now, new)
                continue
            # `stamp` written out, since in most steps it is everybody.
            one.last_token = now
            one.tokens = present
