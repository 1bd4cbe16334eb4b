"""A request, its phase, and the times of its events.

`Request` holds facts known at arrival and never changes. `Phase` changes by a table of legal moves.
`Timeline` is the only place where timestamps become durations.
"""

from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.clock import NO_TIME, Duration, Instant, after, between
from controlplane.core.deadlines import Progress
from controlplane.core.slo import ServiceClass, Slo


class Owner(StrEnum):
    """Owner of memory in the pool."""

    LLM = "llm"
    EMBEDDING = "embedding"


class Kind(StrEnum):
    """Kind of work requested."""

    GENERATE = "generate"
    EMBED = "embed"

    @property
    def owner(self) -> Owner:
        """The owner whose memory serves this kind."""
        return Owner.LLM if self is Kind.GENERATE else Owner.EMBEDDING


VALUE_COST = 0.1
"""What a log probability costs the server, in streamed output tokens: 32 to 39 of 359 us of its CPU time."""


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """Features of a prompt for forecasts, without its text.

    `numbers` and `words` (hashes) are defined in `predictors.output_length.features`. `vector` is the
    prompt's embedding as float16, empty if none was computed.
    """

    numbers: tuple[float, ...]
    words: tuple[int, ...]
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived.

    `prompt_tokens` counts all inputs. `sequences` is `n` for generation and the number of inputs for
    embeddings.
    """

    id: str
    kind: Kind
    model: str
    tenant: str
    service_class: ServiceClass
    slo: Slo
    arrival: Instant
    prompt_tokens: int
    max_output_tokens: int
    sequences: int = 1
    features: PromptFeatures | None = None
    runs_to_limit: bool = False
    """Nothing ends the output before `max_output_tokens`."""
    adapter: str | None = None
    """LoRA adapter of the model to generate with; None for the model itself."""
    cached_tokens: int = 0
    """Prompt tokens that the engine is expected to have in its prefix cache."""
    values_per_token: int = 0
    """Log probabilities in the answer for each of its tokens, the chosen one and alternatives."""
    echoes_values: bool = False
    """The answer has as many for each token of the prompt, too."""

    @property
    def name_of_model(self) -> str:
        """The name that the client asked for, of the model or of its adapter."""
        return self.adapter or self.model

    @property
    def first_deadline(self) -> Instant | None:
        """Deadline of the first token, or of an embedding's vectors: the earlier of TTFT and e2e."""
        bounds = [after(self.arrival, each) for each in (self.slo.ttft, self.slo.e2e) if each is not None]
        return min(bounds) if bounds else None

    @property
    def choices(self) -> int:
        """Sequences that an engine runs for it at once: `n`, and 1 for embeddings."""
        return self.sequences if self.kind is Kind.GENERATE else 1

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the engine is expected to compute."""
        return self.prompt_tokens - self.cached_tokens

    def charged_tokens(self, output_tokens: int) -> int:
        """Tokens that an answer of so many for each choice counts as, with its log probabilities."""
        written = output_tokens * self.choices
        echoed = self.prompt_tokens if self.echoes_values and written else 0
        return written + round((written + echoed) * self.values_per_token * VALUE_COST)


class Phase(StrEnum):
    """State of a request in its life cycle."""

    QUEUED = "queued"
    DEFERRED = "deferred"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.DEFERRED, Phase.PREFILL, Phase.FINISHED}),
    Phase.DEFERRED: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PREEMPTED, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.PREEMPTED, Phase.FINISHED}),
    Phase.PREEMPTED: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A request was moved along an edge that `LEGAL_MOVES` lacks."""


def moved(phase: Phase, to: Phase) -> Phase:
    """Returns `to`. Raises IllegalTransition if the move is not legal."""
    if to not in LEGAL_MOVES[phase]:
        raise IllegalTransition(f"{phase} -> {to}: legal from {phase}: {sorted(LEGAL_MOVES[phase])}")
    return to


@dataclass(slots=True)
class Timeline:
    """Timestamps of one request. TTFT counts from arrival at the host; TPOT excludes the first token."""

    arrival: Instant
    dispatched: Instant | None = None
    first_token: Instant | None = None
    last_token: Instant | None = None
    finished: Instant | None = None
    output_tokens: int = 0
    longest_gap: Duration = NO_TIME

    def stamp_tokens(self, now: Instant, tokens: int) -> None:
        """Records `tokens` output tokens at `now`."""
        last = self.last_token
        if self.first_token is None:
            self.first_token = now
        elif last is not None and now - last > self.longest_gap:
            self.longest_gap = between(last, now)
        self.last_token = now
        self.output_tokens += tokens

    @property
    def queue(self) -> Duration | None:
        """Time from arrival to dispatch."""
        return None if self.dispatched is None else between(self.arrival, self.dispatched)

    @property
    def ttft(self) -> Duration | None:
        """Time to first token."""
        return None if self.first_token is None else between(self.arrival, self.first_token)

    @property
    def tpot(self) -> Duration | None:
        """Mean time per output token after the first; None before the second token."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return Duration((self.last_token - self.first_token) // (self.output_tokens - 1))

    @property
    def e2e(self) -> Duration | None:
        """End-to-end time."""
        return None if self.finished is None else between(self.arrival, self.finished)

    @property
    def gap(self) -> Duration | None:
        """Longest time between two tokens; None before the second token."""
        return None if self.output_tokens < 2 else self.longest_gap

    @property
    def progress(self) -> Progress:
        """Progress of a generation, from which its slack follows."""
        return Progress(self.arrival, self.first_token, self.last_token, self.output_tokens)

    def measured(self, kind: Kind) -> dict[str, Duration | None]:
        """The measured value of each objective; None where there is none.

        The TTFT of an embedding is its end-to-end time. A generation without tokens has no TTFT, nor has an
        embedding that was never dispatched.
        """
        ttft = self.ttft
        if kind is Kind.EMBED and self.dispatched is not None:
            ttft = self.e2e
        return {"ttft": ttft, "tpot": self.tpot, "e2e": self.e2e, "gap": self.gap}

    def has_missed(self, slo: Slo) -> bool:
        """Whether an objective is missed for good before the end: a late first token, or too long a gap."""
        met = self.objectives_met(slo)
        return not (met.get("ttft", True) and met.get("gap", True))

    def objectives_met(self, slo: Slo) -> dict[str, bool]:
        """Whether each stated objective is met by what was measured so far.

        Of a finished request that is final. One-token outputs meet TPOT and gap. Without tokens the end
        must be within the TTFT objective.
        """
        ttft = self.e2e if self.first_token is None else self.ttft
        took_by_name = {"ttft": ttft, "tpot": self.tpot, "e2e": self.e2e, "gap": self.gap}
        return {
            name: took is None or took <= limit
            for name, took in took_by_name.items()
            if (limit := getattr(slo, name)) is not None
        }
