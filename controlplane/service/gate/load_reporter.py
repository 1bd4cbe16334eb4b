"""Makes the load report of this box for the routers of a fleet (`controlplane.fleet.load_report`).

The figures are those that the gate decides by: for each class, the wait that admission would predict for a
new, small request, then the engine's backlog of prompts and one step. Making a report takes time that grows
with the requests in the box, so answers carry the last one and its age. While routers ask, a timer of the
event loop makes a new one every 50 ms.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from secrets import token_hex
from typing import NamedTuple

from controlplane.config import Config, ConfigError
from controlplane.core.clock import Duration, Instant, between, milliseconds, seconds, to_seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace, Share, Waiting
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Kind, Owner, Request, Timeline
from controlplane.core.slo import ServiceClass
from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad, dated, require_small
from controlplane.policy.gate.admission import predicted_wait
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.service.gate.gate import Gate
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.ticket import Ticket

_PERIOD = milliseconds(50)
_LONGEST_AGE = milliseconds(250)
"""An older report is replaced before the answer: the timer was late, or no router has asked for a second."""
_ASKED_WITHIN = seconds(1)
"""The timer ends when no router has asked for so long."""
_MINUTE = seconds(60)
_KINDS = {kind.owner: kind for kind in Kind}
_by_rank = attrgetter("rank")


def require_small_reports(config: Config, generators: Iterable[str], encoders: Iterable[str]) -> None:
    """Raises ConfigError if routers are configured and the reports of these models may be too large for them.

    Args:
        config: states the classes, and the key of the routers.
        generators: names of the LLMs.
        encoders: names of the embedding models and rerankers.
    """
    if config.server.router_key_sha256 is None:
        return
    owners = dict.fromkeys(generators, Owner.LLM.value) | dict.fromkeys(encoders, Owner.EMBEDDING.value)
    try:
        require_small(owners, config.service_classes())
    except ValueError as error:
        raise ConfigError(f"server.router_key_sha256: {error}") from error


class _Made(NamedTuple):
    """A report, when it was made, and its JSON without the age."""

    at: Instant
    report: LoadReport
    body: str


class LoadReporter:
    """Reads the gate's state into a report; changes nothing but the engine leases, which it syncs first.

    `classes` gives the service classes of the present configuration, the default one first. A gate that
    drains serves no model.
    """

    def __init__(
        self,
        gate: Gate,
        classes: Callable[[], Iterable[ServiceClass]],
        generators: Mapping[str, Generator],
        embedders: Mapping[str, Embedder],
    ) -> None:
        self.health = HealthTracker("no load report can be made", "load reports are made again")
        self._gate = gate
        self._dispatcher = gate.dispatcher
        self._classes = classes
        self._backends: dict[Owner, Mapping[str, Generator | Embedder]] = {
            Owner.LLM: generators,
            Owner.EMBEDDING: embedders,
        }
        self._generators = generators
        self._embedders = embedders
        self._epoch = token_hex(6)
        self._number = 0
        self._made: _Made | None = None
        self._asked_at = Instant(0)
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def text(self) -> str:
        """The last report as JSON with its age, at most 250 ms and 50 ms while the event loop is on time.

        For routers, on the event loop: keeps the report new from now on.
        """
        made = self._kept_new()
        return dated(made.body, self._age(made))

    def header(self) -> str | None:
        """`text` for a header of an answer, which is right without it; None if no report can be made."""
        with suppress(Exception):
            # `health` has logged it.
            return self.text()
        return None

    def whole(self, *, has_tenants: bool, has_prefixes: bool) -> str:
        """The report of `text` with the parts that are asked for."""
        made, accounting = self._kept_new(), self._dispatcher.accounting
        return replace(
            made.report,
            age=self._age(made),
            served_tokens=accounting.served_tokens if has_tenants else {},
            prefixes=self._dispatcher.prefixes.digests() if has_prefixes else {},
        ).to_text()

    def utilisation(self) -> float | None:
        """The report's utilisation, at most 50 ms old; None if no report can be made."""
        with suppress(Exception):
            # `health` has logged it.
            return self._at_most(_PERIOD).report.utilisation
        return None

    def stop(self) -> None:
        """Ends the timer; from then on a report is made when one is asked for and the last is 50 ms old."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _age(self, made: _Made) -> float:
        return to_seconds(between(made.at, self._gate.clock.now()))

    def _kept_new(self) -> _Made:
        """The last report, for a router; starts the timer."""
        if self._is_stopped:
            return self._at_most(_PERIOD)
        self._asked_at = self._gate.clock.now()
        made = self._at_most(_LONGEST_AGE)
        if self._timer is None:
            self._start_timer()
        return made

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(to_seconds(_PERIOD), self._renew)

    def _renew(self) -> None:
        """Makes the report of the next answers, and sets the timer again, while routers ask."""
        self._timer = None
        if between(self._asked_at, self._gate.clock.now()) < _ASKED_WITHIN:
            self._start_timer()
            with suppress(Exception):
                # `health` has logged it.
                self._make()

    def _at_most(self, age: Duration) -> _Made:
        """The last report if it is not older, else a new one."""
        made = self._made
        if made is None or between(made.at, self._gate.clock.now()) >= age:
            return self._make()
        return made

    def _make(self) -> _Made:
        now = self._gate.clock.now()
        try:
            report = self.report()
            self._made = made = _Made(now, report, report.body())
        except Exception as error:
            self.health.failed(error)
            raise
        self.health.succeeded()
        return made

    def report(self) -> LoadReport:
        """A report made now."""
        now, dispatcher = self._gate.clock.now(), self._dispatcher
        dispatcher.sync_engine_leases()
        self._number += 1
        share = partial(dispatcher.snapshots.share, extra_slots=0, now=now)
        shares = {owner: share(owner) for owner, backends in self._backends.items() if backends}
        owners = {owner: self._owner(owner, share, now) for owner, share in shares.items()}
        return LoadReport(
            epoch=self._epoch,
            number=self._number,
            age=0.0,
            models={} if self._gate.is_closed else self._models(),
            owners={owner.value: load for owner, load in owners.items()},
            utilisation=max(
                (self._utilisation(owner, shares[owner], load) for owner, load in owners.items()), default=0.0
            ),
            attainment={
                name: count.met / count.ended
                for name, count in dispatcher.recorder.attainment.within(_MINUTE, now).items()
                if count.ended
            },
        )

    def _models(self) -> dict[str, ModelLoad]:
        """The models that answer now; those of a dead engine or worker are left out."""
        down = {name for name, embedder in self._embedders.items() if embedder.down is not None}
        return {
            name: ModelLoad(
                owner.value,
                _token_seconds(self._dispatcher.pace_estimators.of(owner).pace_of(name)),
                self._token_bytes(name),
            )
            for owner, backends in self._backends.items()
            for name in backends
            if self._gate.outage(name) is None and name not in down
        }

    def _token_bytes(self, model: str) -> int:
        """Bytes of KV cache per prompt token; embeddings wait for time and not for memory of their size."""
        generator = self._generators.get(model)
        return 0 if generator is None else generator.geometry.bytes_per_token

    def _owner(self, owner: Owner, share: Share, now: Instant) -> OwnerLoad:
        queue = self._dispatcher.queued(owner)
        load, token = share.decode_load, _token_seconds(share.pace)
        needed = sum(waiting.footprint.base for waiting in queue)
        free_bytes = share.ceiling - share.held
        backlog = Duration(0)
        if owner is Owner.EMBEDDING:
            ahead = sum(tokens for _, tokens in share.calls)
        else:
            ahead = 0 if load is None else load.prompt_tokens_pending
            if load is not None and load.sequences:
                backlog = load.backlog
                free_bytes = min(free_bytes, round(load.unclaimed_bytes))
        ahead += sum(waiting.request.prefill_tokens for waiting in queue)
        return OwnerLoad(
            {
                each.name: to_seconds(self._intercept(owner, each, share, queue, backlog, now))
                for each in self._classes()
            },
            ahead * token,
            max(0, free_bytes - needed),
        )

    def _intercept(
        self,
        owner: Owner,
        service_class: ServiceClass,
        share: Share,
        queue: Sequence[Waiting],
        backlog: Duration,
        now: Instant,
    ) -> Duration:
        """Time until a new, small request of this class has its first token, apart from its own prompt."""
        if (pace := share.pace) is None:
            return Duration(0)
        entry = self._probe(owner, service_class, now)
        ahead = share.work(queue[: bisect_left(queue, entry.rank, key=_by_rank)])
        leases = share.leases
        if share.engine_work_ahead is not None:
            ahead += share.engine_work_ahead(entry)
            # The queue of such an engine has no end; the wait in it is its work ahead.
            share = replace(share, free_slots=max(1, share.free_slots))
        if share.engine_keeps is not None:
            leases = share.engine_keeps(entry)
        wait = predicted_wait(share, LookAhead(leases), entry, ahead=ahead) or Duration(0)
        if share.is_serial:
            return Duration(wait + pace.step)
        return Duration(self._dispatcher.ttft.expected_wait(wait) + backlog + pace.step)

    def _probe(self, owner: Owner, service_class: ServiceClass, now: Instant) -> Waiting:
        """The queue entry of a request of one token, which is never put into the queue."""
        model = next(iter(self._backends[owner]))
        request = Request(
            id="load-report",
            kind=_KINDS[owner],
            model=model,
            tenant="",
            service_class=service_class,
            slo=service_class.slo if owner is Owner.LLM else service_class.slo.without_tokens(),
            arrival=now,
            prompt_tokens=1,
            max_output_tokens=1,
        )
        size = max(1, self._token_bytes(model))
        return self._dispatcher.entry_for(
            Ticket(request, Footprint(size, size, 1, size), None, Timeline(now))
        )

    def _utilisation(self, owner: Owner, share: Share, load: OwnerLoad) -> float:
        """The largest part in use: of memory, of slots, and of a TTFT objective by the work before it."""
        used = self._dispatcher.snapshots.slots(owner) - share.free_slots
        slots = used / max(1, used + max(0, share.free_slots))
        objectives = (
            load.intercepts[each.name] / to_seconds(each.slo.ttft)
            for each in self._classes()
            if each.slo.ttft is not None
        )
        return max(1 - load.free_bytes / max(1, share.ceiling), slots, *objectives)


def _token_seconds(pace: Pace | None) -> float:
    return 0.0 if pace is None else to_seconds(pace.per_prompt_token)
