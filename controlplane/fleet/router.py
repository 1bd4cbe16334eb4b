"""Chooses one of two boxes by predicted TTFT, and at most one other box after a refusal.

Two boxes are drawn by weight; the last box of the request's blocks takes the place of the first.
The one with the shorter predicted TTFT is chosen: the forecast of its last report, plus the work that this
router sent to it since, plus the tokens of the prompt that it does not have cached. Two choices need far less
fresh reports than more choices do, because routers that share a stale report then do not all choose the same
box (Mitzenmacher 2001, "The power of two choices"). A session, and a prefix that the request names, has two
homes, on which all routers agree: the first one that is not much busier than the box found so is chosen
instead.

Admission stays in the box. A refusal (429) is a report too, and may be followed by one more try.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from controlplane.fleet.affinity import AffinityTable, PrefixHomes
from controlplane.fleet.load_report import LoadReport, ModelLoad
from controlplane.fleet.prefix_digest import PrefixDigest
from controlplane.fleet.routing_rules import (
    PREFIX_WORTH,
    REQUEST_TOKENS,
    drawn_box,
    drawn_other,
    is_better,
    may_retry,
    predicted_ttft,
)


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Parameters of a router.

    Attributes:
        useful_for: seconds for which a report is compared; a box without a younger one is drawn at random.
        transit: seconds for which a request may be on its way, so that the next report does not count it yet.
        retry_share: second tries per request.
        retry_burst: second tries that may follow each other after a time without any.
        retry_headroom: part of the objective below which the other box's forecast must be.
        remembered: prompt blocks whose last box is remembered.
    """

    useful_for: float = 1.0
    transit: float = 0.002
    retry_share: float = 0.1
    retry_burst: float = 10.0
    retry_headroom: float = 0.7
    remembered: int = 100_000


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router knows of a request: generation, embedding or reranking alike.

    Attributes:
        model: name of the served model.
        service_class: its class; empty if it names none.
        prompt_tokens: tokens of all its inputs.
        objective: TTFT objective in seconds, for embeddings that of the response; None without one.
        session: identifies a conversation, whose prompts are taken to grow at their end.
        blocks: hashes of the prompt's blocks (`controlplane.core.prefix_index.block_hashes`), if known.
        block_tokens: tokens of a block.
        prefix: names the leading tokens, if many prompts have these, such as a system prompt or a document.
        prefix_tokens: how many these are.

    A request with a session and a prefix goes to the homes of the prefix.
    """

    model: str
    service_class: str
    prompt_tokens: int
    objective: float | None = None
    session: str | None = None
    blocks: Sequence[int] = ()
    block_tokens: int = 16
    prefix: str | None = None
    prefix_tokens: int = 0

    @property
    def kept(self) -> tuple[str | None, int]:
        """Name and tokens of what a home is to have of the prompt: with a session all, for its next turn."""
        if self.prefix is None:
            return self.session, self.prompt_tokens
        return self.prefix, self.prefix_tokens


@dataclass(frozen=True, slots=True)
class ChosenBox:
    """The chosen box, its predicted TTFT in seconds (None without a report), and the prefill it is given."""

    box: str
    ttft: float | None
    work: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of a box that states that it did not start the request, and its Retry-After in seconds."""

    box: str
    retry_after: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that this router sent to a box."""

    at: float
    model: str
    service_class: str
    work: float
    bytes: int


@dataclass(eq=False, slots=True)
class _Box:
    weight: float
    report: LoadReport | None = None
    described_at: float = -inf
    sent: list[_Sent] = field(default_factory=list)
    prefixes: Mapping[str, PrefixDigest] = field(default_factory=dict)

    def load_of(self, model: str) -> ModelLoad | None:
        return None if self.report is None else self.report.models.get(model)

    def keeps_prompts(self, model: str) -> bool:
        """Whether the box may have a prompt cached; embeddings and reranking keep nothing."""
        load = self.load_of(model)
        return load is None or load.token_bytes > 0

    def sent_work(self, request: RoutedRequest) -> float:
        """Seconds of prefill sent since the report that precede this request at the box.

        A class with a shorter intercept precedes, as it does in the box's queue.
        """
        report, own = self.report, self.load_of(request.model)
        if report is None or own is None:
            return 0.0
        behind = report.intercept(request.model, request.service_class)
        return sum(
            sent.work
            for sent in self.sent
            if (load := self.load_of(sent.model)) is not None
            and load.owner == own.owner
            and report.intercept(sent.model, sent.service_class) <= behind
        )

    def missing_bytes(self, request: RoutedRequest, load: ModelLoad, free_bytes: int) -> int:
        """Bytes that the prompt needs beyond those free in the report and not taken by own sends."""
        taken = sum(
            sent.bytes
            for sent in self.sent
            if (other := self.load_of(sent.model)) is not None and other.owner == load.owner
        )
        return max(0, request.prompt_tokens * load.token_bytes + taken - free_bytes)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Boxes that serve a model, by name, with the running sums of their weights, and homes of prefixes."""

    names: tuple[str, ...]
    places: Mapping[str, int]
    cumulative: tuple[float, ...]
    homes: PrefixHomes


class Router:
    """The state of one router; several routers of a fleet share nothing but the boxes' reports."""

    def __init__(self, options: RoutingOptions | None = None) -> None:
        self.options = options or RoutingOptions()
        self._boxes: dict[str, _Box] = {}
        self._names: list[str] = []
        self._pools: dict[str, _Pool] = {}
        self._scarcest: dict[str, str] = {}
        self._affinity = AffinityTable(self.options.remembered)
        self._retries = self.options.retry_burst

    def add(self, box: str, weight: float = 1.0) -> None:
        """Adds a box, or changes its weight: its share of the draws, in proportion to its speed.

        Raises ValueError unless the weight is positive and finite.
        """
        if not 0 < weight < inf:
            raise ValueError(f"weight={weight} of {box}: send a positive number, 1 for an ordinary box")
        known = self._boxes.get(box)
        if known is None:
            self._boxes[box] = _Box(weight)
            insort(self._names, box)
        else:
            known.weight = weight
        self._forget_pools()

    def remove(self, box: str) -> None:
        """Removes a box that left the fleet; raises KeyError if it is not in it."""
        del self._boxes[box]
        self._names.remove(box)
        self._forget_pools()

    def heard(self, box: str, report: LoadReport, now: float) -> None:
        """Takes a report of a box; one that is older than the last of its process is ignored.

        Raises KeyError for a box that is not in the fleet.
        """
        known = self._boxes[box]
        described_at = now - report.age
        last = known.report
        if last is not None and last.epoch == report.epoch and report.number < last.number:
            return
        changed = [m for m, pool in self._pools.items() if (box in pool.places) != (m in report.models)]
        for model in changed:
            del self._pools[model]
        if last is None or last.models.keys() != report.models.keys():
            self._scarcest.clear()
        if report.prefixes or last is None or last.epoch != report.epoch:
            known.prefixes = report.prefixes
        known.report, known.described_at = report, described_at
        # What was sent just before the report was made may not have arrived by then.
        known.sent = [sent for sent in known.sent if sent.at > described_at - self.options.transit]

    def reports(self) -> Iterator[LoadReport]:
        """The last report of each box that has sent one, in the order of the boxes' names."""
        return (report for name in self._names if (report := self._boxes[name].report) is not None)

    def report(self, box: str) -> LoadReport | None:
        """The last report of a box; None if it has sent none, or is not in the fleet."""
        known = self._boxes.get(box)
        return None if known is None else known.report

    def scarcest_model(self, owner: str) -> str:
        """The model of an owner that the fewest boxes serve; empty if none is served.

        A router that does not know the model of a request takes this one: a box where any model of the owner
        is down refuses at once, looks idle therefore, and would get most of the requests for that model.
        """
        if owner not in self._scarcest:
            served = Counter(
                name
                for report in self.reports()
                for name, load in report.models.items()
                if load.owner == owner
            )
            self._scarcest[owner] = min(served, key=served.__getitem__, default="")
        return self._scarcest[owner]

    def choose(self, request: RoutedRequest, now: float, draws: tuple[float, float]) -> ChosenBox | None:
        """The box for a new request; None if no box serves its model. `sent` records that it is used."""
        pool = self._pool(request.model)
        if not pool.names:
            return None
        affinity = self._affinity.find(request.model, request.blocks)
        place = None if affinity is None else pool.places.get(affinity.box)
        if place is None or not self._boxes[pool.names[place]].keeps_prompts(request.model):
            place = drawn_box(pool.cumulative, draws[0])
        other = drawn_other(pool.cumulative, place, draws[1])
        best = self._better(pool.names[place], pool.names[other], request, now)
        for home in pool.homes.of(request.kept[0]):
            if self._keeps_home(home, best.box, request, now):
                return self._choice(home, request)
        return best

    def _keeps_home(self, home: str, other: str, request: RoutedRequest, now: float) -> bool:
        """Whether a home is chosen although the other box may be less busy."""
        box = self._boxes[home]
        if not box.keeps_prompts(request.model):
            return False
        load = box.load_of(request.model)
        worth = 0.0 if load is None else PREFIX_WORTH * load.per_token * request.kept[1]
        age, missing, ttft = self._comparison(home, request, now)
        compared = self._comparison(other, request, now)
        return not is_better(*compared, age, missing, ttft - worth, self.options.useful_for)

    def sent(self, request: RoutedRequest, choice: ChosenBox, now: float) -> None:
        """Records that a request is sent to the box that was chosen for it."""
        self._retries = min(self.options.retry_burst, self._retries + self.options.retry_share)
        self._record(request, choice, now)

    def refused(
        self, request: RoutedRequest, refusals: Sequence[Refusal], now: float, draw: float
    ) -> ChosenBox | float:
        """Another box to send a refused request to, or the Retry-After in seconds to answer with.

        After one refusal, another box is tried if the budget allows it and the forecast of a useful report
        leaves room; the try is recorded as sent. Otherwise the answer is the smallest Retry-After.
        """
        retry_after = min(refusal.retry_after for refusal in refusals)
        if len(refusals) > 1:
            return retry_after
        pool = self._pool(request.model)
        place = pool.places.get(refusals[0].box)
        if place is None or len(pool.names) < 2:
            return retry_after
        other = pool.names[drawn_other(pool.cumulative, place, draw)]
        age, _, ttft = self._comparison(other, request, now)
        objective, options = inf if request.objective is None else request.objective, self.options
        if not may_retry(self._retries, age, ttft, objective, options.retry_headroom, options.useful_for):
            return retry_after
        self._retries -= 1.0
        choice = self._choice(other, request)
        self._record(request, choice, now)
        return choice

    def _record(self, request: RoutedRequest, choice: ChosenBox, now: float) -> None:
        box = self._boxes.get(choice.box)
        if box is None:
            return
        load = box.load_of(request.model)
        held = 0 if load is None else request.prompt_tokens * load.token_bytes
        box.sent = [sent for sent in box.sent if sent.at > now - self.options.useful_for]
        box.sent.append(_Sent(now, request.model, request.service_class, choice.work, held))
        if box.keeps_prompts(request.model):
            self._affinity.sent(choice.box, request.model, request.blocks, request.block_tokens)

    def _forget_pools(self) -> None:
        self._pools.clear()
        self._scarcest.clear()

    def _pool(self, model: str) -> _Pool:
        """The boxes that serve the model by their last report, or that have not reported yet."""
        if (known := self._pools.get(model)) is not None:
            return known
        names = [name for name in self._names if self._may_serve(self._boxes[name], model)]
        weights = [self._boxes[name].weight for name in names]
        pool = _Pool(
            tuple(names),
            {name: at for at, name in enumerate(names)},
            tuple(accumulate(weights)),
            PrefixHomes(names, weights),
        )
        # A name that no box serves may be any text that a client sent.
        if any(box.load_of(model) is not None for box in self._boxes.values()):
            self._pools[model] = pool
        return pool

    def _may_serve(self, box: _Box, model: str) -> bool:
        return box.report is None or model in box.report.models

    def _better(self, first: str, other: str, request: RoutedRequest, now: float) -> ChosenBox:
        if first == other:
            return self._choice(first, request)
        is_other = is_better(
            *self._comparison(other, request, now),
            *self._comparison(first, request, now),
            self.options.useful_for,
        )
        return self._choice(other if is_other else first, request)

    def _comparison(self, name: str, request: RoutedRequest, now: float) -> tuple[float, float, float]:
        """Age of the report, bytes of memory that are missing, and the predicted TTFT."""
        box = self._boxes[name]
        load, ttft = box.load_of(request.model), self._ttft(name, request)
        if box.report is None or load is None or ttft is None:
            return inf, 0.0, inf
        missing = box.missing_bytes(request, load, box.report.owners[load.owner].free_bytes)
        return now - box.described_at, float(missing), ttft

    def _ttft(self, name: str, request: RoutedRequest) -> float | None:
        box = self._boxes[name]
        load = box.load_of(request.model)
        if box.report is None or load is None:
            return None
        intercept = box.report.intercept(request.model, request.service_class)
        cached = self._cached_tokens(name, request)
        return predicted_ttft(
            intercept, box.sent_work(request), load.per_token, request.prompt_tokens, cached
        )

    def _choice(self, name: str, request: RoutedRequest) -> ChosenBox:
        load = self._boxes[name].load_of(request.model)
        tokens = REQUEST_TOKENS + max(1, request.prompt_tokens - self._cached_tokens(name, request))
        work = 0.0 if load is None else load.per_token * tokens
        return ChosenBox(name, self._ttft(name, request), work)

    def _cached_tokens(self, name: str, request: RoutedRequest) -> int:
        """Leading tokens that the box has: by its digest, or if it sent none, by what it was sent last.

        A home is taken to have what it is to keep, because all routers send it there.
        """
        if not self._boxes[name].keeps_prompts(request.model):
            return 0
        prefixes = self._boxes[name].prefixes.get(request.model)
        if prefixes is not None and request.blocks:
            return prefixes.cached_tokens(request.blocks)
        last = self._affinity.find(request.model, request.blocks)
        remembered = last.tokens if last is not None and last.box == name else 0
        return max(remembered, self._kept_tokens(name, request))

    def _kept_tokens(self, name: str, request: RoutedRequest) -> int:
        """Tokens that a home is to keep, 0 for another box."""
        kept, tokens = request.kept
        return tokens if name in self._pool(request.model).homes.of(kept) else 0
