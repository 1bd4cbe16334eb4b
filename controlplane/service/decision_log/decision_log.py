"""Records ended requests, memory, time models and configurations as rows of the decision log.

The event loop builds the rows, in some microseconds a request; `LogWriter` does the rest.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import orjson

from controlplane.config import Config, ConfigError
from controlplane.config.redacted import redacted_values
from controlplane.core.clock import Clock, Instant, to_seconds
from controlplane.core.decision import Outcome
from controlplane.core.ports import Embedder, EmbeddingPass
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.service.decision_log.block_numbers import BlockNumbers
from controlplane.service.decision_log.log_rows import (
    SCHEMA_VERSION,
    SIMULATED_RUN,
    Row,
    logged_history,
    pass_coefficients,
    request_row,
    step_coefficients,
)
from controlplane.service.decision_log.log_writer import LogWriter
from controlplane.service.decision_log.machine_facts import idle_pass_cost
from controlplane.service.decision_log.reader import find_request
from controlplane.service.decision_log.segment_files import SegmentFiles
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.runtime.timers import MonotonicClock, PeriodicTimer
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import StepReports

_MEMORY_SECONDS, _MODELS_SECONDS = 1.0, 60.0
_REMEMBERED_REJECTIONS = 10_000
_REMEMBERED_PASSES = 64
_SALT_FILE = "tenant-salt"
_FIND_SECONDS = 5.0


class DecisionLog:
    """The decision log of one service.

    Args:
        config: the configuration of the start.
        machine: `machine_facts` of the present backends.
        encoders: the workers of embedding models and rerankers, which may change.
        clock: stamps the rows.
        folder: where the segments are written.
        epoch_ns: time of the clock's zero since the Unix epoch, in nanoseconds.
        run: names this run of the server.
        salt: keeps the hashes of tenants from being guessed.
        has_thread: whether a thread writes; otherwise the event loop does.
    """

    def __init__(
        self,
        config: Config,
        machine: Callable[[], Row],
        encoders: Mapping[str, Embedder],
        clock: Clock,
        *,
        folder: Path,
        epoch_ns: int,
        run: str,
        salt: bytes,
        has_thread: bool,
    ) -> None:
        self.health = HealthTracker("rows of the decision log cannot be built", "rows are built again")
        self._folder, self._run, self._salt = folder, run, salt
        self._clock, self._epoch_ns = clock, epoch_ns
        self._sample = config.decision_log.sample
        self._machine, self._encoders, self._has_thread = machine, encoders, has_thread
        self._llm: StepReports | None = None
        self._tenants: dict[str, str] = {}
        self._blocks = BlockNumbers()
        self._rejected: OrderedDict[tuple[str, ...], tuple[str, Instant]] = OrderedDict()
        # By worker, since another worker of the same model may have another cost.
        self._ratios: WeakKeyDictionary[Embedder, deque[float]] = WeakKeyDictionary()
        self._costs: WeakKeyDictionary[Embedder, tuple[float, float, float]] = WeakKeyDictionary()
        self._version = 0
        self._first = self._row_of(config)
        files = SegmentFiles(folder, run, self._head, keep_bytes=config.decision_log.keep)
        self.writer = LogWriter(files)

    def start(
        self, timer: PeriodicTimer, owners: Callable[[], Mapping[str, Mapping[str, int]]], llm: StepReports
    ) -> None:
        """Starts writing, with the memory of `owners` each second and the time models each minute."""

        async def record_memory() -> None:
            self.writer.put({"row": "sample", "at": self._at(self._clock.now()), "owners": owners()})

        async def record_models() -> None:
            self._record_models()

        self._llm = llm
        if self._has_thread:
            self.writer.start()
        self.writer.put(self._first)
        self._note_costs()
        timer.schedule_periodic(_MEMORY_SECONDS, record_memory)
        timer.schedule_periodic(_MODELS_SECONDS, record_models)

    def _note_costs(self) -> None:
        """Notes the costs of new workers before load scales their time models."""
        for embedder in self._encoders.values():
            self._cost(embedder)

    def close(self) -> None:
        """Writes the time models once more, and ends the log."""
        self._record_models()
        self.writer.close()

    def record_request(self, ticket: Ticket) -> None:
        """Writes the row of an ended request; an exception costs the row only."""
        try:
            row = self._request_row(ticket)
        except Exception as error:
            self.writer.row_failed()
            self.health.failed(error)
        else:
            self.health.succeeded()
            self.writer.put(row)

    def _request_row(self, ticket: Ticket) -> Row:
        request = ticket.request
        return request_row(
            ticket,
            self._at(request.arrival),
            tenant=self._tenant(request.tenant),
            blocks=self._blocks.runs(ticket.prompt_blocks),
            retry_of=self._repeated(ticket),
            has_numbers=self._has_numbers(request.id),
        )

    def _repeated(self, ticket: Ticket) -> str | None:
        """The id of the rejected request that this one repeats; None if it repeats none."""
        request, timeline, found = ticket.request, ticket.timeline, None
        client_id = request.id.rpartition("-")[0]
        key = (request.tenant, client_id, request.kind.value, request.name_of_model)
        rejected = self._rejected.get(key)
        # The prompts of one body have one client id too, and a client may send a request twice at once.
        if rejected is not None and rejected[1] < request.arrival:
            found, _ = self._rejected.pop(key)
        if ticket.outcome is Outcome.REJECTED and timeline.finished is not None:
            self._rejected[key] = request.id, timeline.finished
            if len(self._rejected) > _REMEMBERED_REJECTIONS:
                self._rejected.popitem(last=False)
        return found

    def _record_models(self) -> None:
        passes = {}
        llm = self._llm
        for model, embedder in self._encoders.items():
            if (cost := self._cost(embedder)) is not None:
                passes[model] = pass_coefficients(*cost, self._ratios.get(embedder, ()))
        steps = None if llm is None or not llm.reports_steps else step_coefficients(llm.steps)
        at = self._at(self._clock.now())
        self.writer.put({"row": "steps", "at": at, "llm": steps, "passes": passes})

    def observe_pass(self, embedder: Embedder, done: EmbeddingPass) -> None:
        """Compares a pass with the time that it takes on an idle device."""
        if (cost := self._cost(embedder)) is None:
            return
        base, per_token, per_square = cost
        length = done.padded_tokens / max(1, done.inputs)
        expected = base + done.padded_tokens * (per_token + per_square * length)
        if expected > 0:
            seen = self._ratios.setdefault(embedder, deque(maxlen=_REMEMBERED_PASSES))
            seen.append(to_seconds(done.elapsed) / expected)

    def record_config(self, config: Config) -> None:
        """Writes a configuration that has come into force."""
        self._version += 1
        self._sample = config.decision_log.sample
        self._note_costs()
        self.writer.put(self._row_of(config))

    def find(self, request_id: str) -> list[dict[str, object]]:
        """The explanations of logged requests of this id; reads files, so call it in a thread."""
        self.writer.flush(_FIND_SECONDS)
        found = find_request(self._folder, request_id, seconds=_FIND_SECONDS)
        return [logged_history(row, service_class) for row, service_class in found]

    def readings(self, metrics: Metrics) -> Readings:
        """Rows written and dropped."""
        return {metrics.log_rows: {"written": self.writer.written, "dropped": self.writer.dropped}}

    def _head(self, segment: int) -> Row:
        at = self._at(self._clock.now())
        return {"row": "segment", "at": at, "schema": SCHEMA_VERSION, "run": self._run, "segment": segment}

    def _row_of(self, config: Config) -> Row:
        values = redacted_values(config, self._tenant)
        digest = hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
        return {
            "row": "config", "at": self._at(self._clock.now()), "version": self._version, "hash": digest,
            "config": values, "machine": self._machine(),
        }  # fmt: skip

    def _at(self, instant: int) -> int:
        """Microseconds since the Unix epoch, in steps of 100 for every kind of row, so their order stays."""
        return (instant + self._epoch_ns) // 100_000 * 100

    def _tenant(self, name: str) -> str:
        if (found := self._tenants.get(name)) is None:
            found = self._tenants[name] = tenant_hash(name, self._salt)
        return found

    def _cost(self, embedder: Embedder) -> tuple[float, float, float] | None:
        if embedder not in self._costs and (cost := idle_pass_cost(embedder)) is not None:
            self._costs[embedder] = cost
        return self._costs.get(embedder)

    def _has_numbers(self, request_id: str) -> bool:
        if self._sample >= 1.0:
            return True
        return zlib.crc32(request_id.encode()) < self._sample * 2**32


def tenant_hash(name: str, salt: bytes) -> str:
    """The name of a tenant in the log."""
    return hashlib.sha256(salt + name.encode()).hexdigest()[:12]


def read_salt(folder: Path) -> bytes | None:
    """The salt of the tenants' names in a log; None if it was not kept with the log."""
    try:
        return (folder / _SALT_FILE).read_bytes()
    except OSError:
        return None


def decision_log_of(
    config: Config, machine: Callable[[], Row], encoders: Mapping[str, Embedder], clock: Clock
) -> DecisionLog | None:
    """The decision log of a configuration, whose folder it creates; None if it is off. Raises ConfigError.

    By another clock than the host's the rows are stamped from 1970 on, and equal runs write equal logs.
    """
    is_virtual = not isinstance(clock, MonotonicClock)
    folder = config.decision_log.dir
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        salt = _kept_salt(folder, b"simulation" if is_virtual else secrets.token_bytes(16))
    except OSError as error:
        raise ConfigError(
            f"decision_log.dir={str(folder)!r}: {error.strerror}; give a folder that the server may write"
        ) from error
    epoch_ns = 0 if is_virtual else time.time_ns() - clock.now()
    started = time.strftime("%Y%m%dT%H%M%S", time.gmtime((epoch_ns + clock.now()) / 1e9))
    run = started + (SIMULATED_RUN if is_virtual else f"-{secrets.token_hex(3)}")
    return DecisionLog(
        config,
        machine,
        encoders,
        clock,
        folder=folder,
        epoch_ns=epoch_ns,
        run=run,
        salt=salt,
        has_thread=not is_virtual,
    )


def _kept_salt(folder: Path, new: bytes) -> bytes:
    """The salt in a folder, which only its owner may read; `new` if there is none yet. Raises OSError."""
    owner_only = stat.S_IRUSR | stat.S_IWUSR
    descriptor = os.open(folder / _SALT_FILE, os.O_RDWR | os.O_CREAT, owner_only)
    with os.fdopen(descriptor, "r+b") as file:
        # The boxes of a machine start at the same time, and share the folder.
        fcntl.flock(file, fcntl.LOCK_EX)
        if kept := file.read():
            return kept
        # New, or of a start on a full disk. Without a salt the names of tenants could be guessed.
        os.fchmod(descriptor, owner_only)
        file.write(new)
    return new
