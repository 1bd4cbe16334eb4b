"""The configuration in force and its versions: one immutable object, replaced between two decisions.

A change is prepared first: parsed, validated, its policies built, its new workers loaded. Then the engine
confirms its part. Both may fail and leave all as it was. Then everything in this process is replaced in one
step of the event loop, which cannot fail and during which nothing is decided. A request keeps the classes and
limits that it arrived under.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from controlplane.config import Config, ConfigError
from controlplane.config.documents import Document, digest_of, document_of, masked
from controlplane.config.reconfigure import ChangePlan, plan_change, wanted_config
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.ports import Embedder
from controlplane.metrics import Metrics
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.intake import Intake
from controlplane.service.gate.policies import Policies, terms_of
from controlplane.service.memory.pool import SharedPool
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.request_jobs import RequestTerms
from controlplane.service.runtime.change_guard import ChangeGuard
from controlplane.service.runtime.engine_control import EngineConfigurator
from controlplane.service.worker_replacement import WorkerPlan, WorkerReplacement

log = logging.getLogger(__name__)

_KEPT_VERSIONS = 20


class StaleVersion(Exception):
    """Another change came between; the change is based on a version that is not in force any more."""


@dataclass(frozen=True, slots=True)
class ConfigVersion:
    """One version of the configuration.

    `digest` is the SHA-256 (hex) of its content, `at` the host's time in seconds.
    """

    number: int
    config: Config
    digest: str
    terms: RequestTerms
    at: float
    source: str

    @property
    def etag(self) -> str:
        """Identifies the version, also across restarts of the server."""
        return f'"{self.number}-{self.digest[:16]}"'

    def to_json(self) -> Document:
        """Number, hash, ETag, time and source of the version."""
        return {
            "version": self.number,
            "hash": self.digest,
            "etag": self.etag,
            "at": self.at,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class GuardRequest:
    """How long to watch a change, and how many percentage points of attainment a class may lose.

    Without `drop` nothing is watched. A temporary change is undone after `seconds` in any case.
    """

    seconds: float
    drop: float | None
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class AppliedChange:
    """The outcome of one change; with `is_dry_run` nothing was changed."""

    version: ConfigVersion
    plan: ChangePlan
    is_dry_run: bool
    workers: WorkerPlan | None = None

    def to_json(self) -> Document:
        """The outcome key by key, and worker by worker, for the operator."""
        workers = {} if self.workers is None else {"workers": self.workers.to_json()}
        return {**self.version.to_json(), "dry_run": self.is_dry_run, **self.plan.to_json(), **workers}

    def __str__(self) -> str:
        parts = [f"{key}: {each.before!r} -> {each.after!r}" for key, each in self.plan.applied.items()]
        parts += [f"{key}: needs a restart" for key in self.plan.needs_restart]
        return f"configuration version {self.version.number} ({self.version.source}): " + (
            "; ".join(parts) or "no key changed"
        )


@dataclass(frozen=True, slots=True)
class ConfiguredParts:
    """The parts of a started service that a change replaces something in."""

    gate: Gate
    intake: Intake
    metrics: Metrics
    quotas: QuotaController | None


class Reconfiguration:
    """Holds the version in force and the last versions before it; makes one change at a time.

    `policies_of` builds the policies of a configuration and the number of its version. `workers` replaces
    those of embedding models and rerankers; without it a change of them needs a restart. `listeners` are
    called with each new version, in the same step of the event loop; they must not raise. Nor must
    `on_guard_end`, which is called with each guard that has ended. `overrides` are the
    keys of `server` that the command line states; every whole configuration takes their values. `fixed` are
    those that the host of the server needs; no change gives them other values.
    """

    def __init__(
        self,
        config: Config,
        policies_of: Callable[[Config, int], Policies],
        configurator: EngineConfigurator,
        workers: WorkerReplacement | None,
    ) -> None:
        self.workers = workers
        self.active = _version(1, config, "start")
        self.versions = deque([self.active], maxlen=_KEPT_VERSIONS)
        self.listeners: list[Callable[[ConfigVersion], None]] = []
        self.overrides: Mapping[str, Any] = {}
        self.fixed: Mapping[str, Any] = {}
        self.guard: ChangeGuard | None = None
        self.on_guard_end: Callable[[ChangeGuard], None] = lambda guard: None
        self._failure: Document | None = None
        self._policies_of = policies_of
        self._configurator = configurator
        self._changing = asyncio.Lock()
        # A change may load workers for minutes, and a restarted engine needs its options at once.
        self._ordering = asyncio.Lock()
        self._parts: ConfiguredParts | None = None

    def attach(self, parts: ConfiguredParts) -> None:
        """Names the parts to change, once they exist."""
        self._parts = parts

    def to_json(self) -> Document:
        """The version in force with its content (secrets masked), the earlier versions, the last failure."""
        return {
            **self.active.to_json(),
            "config": masked(document_of(self.active.config)),
            "versions": [version.to_json() for version in self.versions],
            "last_failure": self._failure,
            "guard": None if self.guard is None else self.guard.to_json(),
            "workers": None if self.workers is None else self.workers.to_json(),
        }

    def failure(self) -> str | None:
        """The last change in words if it failed."""
        if (failed := self._failure) is None:
            return None
        return (
            f"the change by {failed['source']} failed, and version {self.active.number} stays in force: "
            f"{failed['error']}"
        )

    async def change(
        self,
        content: object,
        *,
        source: str,
        expected: Collection[str] | None = None,
        is_dry_run: bool = False,
        guard: GuardRequest | None = None,
    ) -> AppliedChange:
        """Applies a whole configuration or a part of one, all of it or nothing.

        Args:
            content: the document; what it means is stated at `wanted_config`.
            source: origin of the change, for the log and the list of versions.
            expected: ETags of the versions that the change may be based on; None for any.
            is_dry_run: only says what would change.
            guard: watches the change, and undoes it if a class loses too much attainment or its time is over.

        Raises:
            StaleVersion: another version than `expected` is in force.
            ConfigError: a value is invalid, or the memory does not suffice.
            Refused, BackendDown, BackendFailed: the engine did not take the change, or a worker did not load.
        """
        async with self._one_change(source, expected, is_dry_run=is_dry_run):
            former = self.active
            wanted, stated = wanted_config(former.config, content, overrides=self.overrides, fixed=self.fixed)
            found = await self._apply(wanted, stated, source=source, is_dry_run=is_dry_run)
            if guard is not None and self.active is not former:
                self._watch(guard, former)
            return found

    async def replace(self, wanted: Config, *, source: str) -> AppliedChange:
        """Applies a whole configuration that was loaded from a file. Raises as `change` does."""
        async with self._one_change(source, None, is_dry_run=False):
            return await self._apply(wanted, None, source=source, is_dry_run=False)

    async def roll_back(
        self,
        number: int | None = None,
        *,
        source: str,
        expected: Collection[str] | None = None,
        is_dry_run: bool = False,
    ) -> AppliedChange:
        """Puts an earlier version in force again, the one before the present by default, as a new version.

        Raises ConfigError if that version is not kept, else as `change` does.
        """
        async with self._one_change(source, expected, is_dry_run=is_dry_run):
            wanted = self._kept(number).config
            return await self._apply(wanted, None, source=source, is_dry_run=is_dry_run)

    async def engine_restarted(self) -> None:
        """Gives a new engine the options in force."""
        async with self._ordering:
            await self._configurator.engine_restarted()

    @asynccontextmanager
    async def _one_change(
        self, source: str, expected: Collection[str] | None, *, is_dry_run: bool
    ) -> AsyncIterator[None]:
        """Admits one change at a time, based on an `expected` version, and records its failure."""
        async with self._changing:
            if expected is not None and self.active.etag not in expected:
                raise StaleVersion(
                    f"the change is based on {', '.join(expected)} and {self.active.etag} is in force; "
                    "read it with GET /admin/config, and repeat the change on it"
                )
            try:
                yield
            except (ConfigError, Refused, BackendDown, BackendFailed) as error:
                if not is_dry_run:
                    self.failed(error, source)
                raise

    def failed(self, error: Exception, source: str) -> None:
        """Shows and logs the failure of a change, such as a file that cannot be read."""
        self._failure = {"at": time.time(), "source": source, "error": str(error)}
        log.error(
            "%s: the change failed and configuration version %d stays in force: %s",
            *(source, self.active.number, error),
        )

    def close(self) -> None:
        """Ends the guard; the version in force stays."""
        if self.guard is not None:
            self.guard.stop()

    def _watch(self, asked: GuardRequest, former: ConfigVersion) -> None:
        parts, guarded = self._started(), self.active

        async def undo(reason: str) -> None:
            log.warning("configuration version %d is undone: %s", guarded.number, reason)
            await self.roll_back(former.number, source="guard", expected=[guarded.etag])

        self.guard = ChangeGuard(
            guarded.number,
            asked.seconds,
            asked.drop,
            tuple(guarded.terms.classes),
            parts.gate.dispatcher.recorder.attainment,
            parts.gate.clock.now,
            undo,
            is_temporary=asked.is_temporary,
            on_end=self.on_guard_end,
        )
        self.guard.start()

    def _started(self) -> ConfiguredParts:
        if self._parts is None:
            raise BackendDown("the service has not started; repeat the change when it is ready")
        return self._parts

    def _kept(self, number: int | None) -> ConfigVersion:
        wanted = self.active.number - 1 if number is None else number
        found = next((version for version in self.versions if version.number == wanted), None)
        if found is None:
            kept = ", ".join(str(version.number) for version in self.versions)
            raise ConfigError(
                f"version={wanted}: not kept; this server has the versions {kept}. Choose one of them"
            )
        return found

    async def _apply(
        self, wanted: Config, stated: Document | None, *, source: str, is_dry_run: bool
    ) -> AppliedChange:
        parts, before = self._started(), self.active
        plan = plan_change(
            before.config,
            wanted,
            quotas_move=parts.quotas is not None,
            replaces_workers=self.workers is not None,
            stated=stated,
        )
        found = _version(before.number + 1, plan.config, source)
        policies = self._policies_of(plan.config, found.number)
        workers = None if self.workers is None else await self.workers.plan(before.config, plan.config)
        if is_dry_run:
            if parts.quotas is not None:
                parts.quotas.divided(plan.config)
            return AppliedChange(before, plan, is_dry_run, workers)
        change = AppliedChange(found, plan, is_dry_run, workers)
        # Workers are loaded before the engine gets its options, since a model may not load.
        async with self._loaded(workers) as loaded:
            after = None if self.workers is None or workers is None else self.workers.after(workers, loaded)
            pool = None if parts.quotas is None else parts.quotas.divided(plan.config, after)
            async with self._ordering:
                # Also without a new value: after a failure the engine may have options that are not in force.
                await self._configurator.apply(plan.config.engine_options())
                if not plan.applied:
                    return self._unchanged(plan)
                self._swap(change, policies, pool, loaded)
        log.info("%s", change)
        return change

    @asynccontextmanager
    async def _loaded(self, plan: WorkerPlan | None) -> AsyncIterator[Mapping[str, Embedder]]:
        """The new workers of a change, by name; stopped if the block raises before the switch to them."""
        if self.workers is None or plan is None:
            yield {}
            return
        loaded = await self.workers.start(plan)
        try:
            yield loaded
        except BaseException:
            await self.workers.abandon(loaded)
            raise
        self.workers.announce(plan)

    def _swap(
        self,
        change: AppliedChange,
        policies: Policies,
        pool: SharedPool | None,
        loaded: Mapping[str, Embedder],
    ) -> None:
        """Puts a change in force. Nothing waits and nothing fails: no decision sees a part of it."""
        parts, found, config = self._started(), change.version, change.plan.config
        self.active = found
        self.versions.append(found)
        parts.intake.set_terms(found.terms, config.server.limits)
        parts.metrics.add_classes(found.terms.classes.values())
        if parts.quotas is not None and pool is not None:
            parts.quotas.set_division(pool, config.quota.forecast.quantile)
        if self.workers is not None and change.workers is not None:
            self.workers.switch(change.workers, loaded)
        parts.gate.set_policies(policies)
        self._failure = None
        if self.guard is not None:
            self.guard.supersede()
        # Last, so that a defect in one of them cannot leave the gate with the former policies.
        for listener in self.listeners:
            listener(found)

    def _unchanged(self, plan: ChangePlan) -> AppliedChange:
        change = AppliedChange(self.active, plan, is_dry_run=False)
        self._failure = None
        if plan.needs_restart:
            log.warning("%s", change)
        return change


def _version(number: int, config: Config, source: str) -> ConfigVersion:
    return ConfigVersion(number, config, digest_of(config), terms_of(config), time.time(), source)
