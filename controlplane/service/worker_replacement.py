"""Replaces the workers of embedding models and rerankers while the service runs.

A new worker is loaded first, on memory that is reserved for it. Then new requests go to it, in the step of
the event loop in which the new configuration comes into force. A worker that it replaces answers the requests
that it has, is stopped, and its memory is free again. A worker that does not load changes nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from controlplane.config import Config, ConfigError
from controlplane.config.models_section import EmbeddingModel, RerankerModel, WorkerModel
from controlplane.core.errors import BackendDown
from controlplane.core.ports import Embedder, Reranker
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.memory.worker_reserve import WorkerReserve
from controlplane.service.runtime.start_progress import StartProgress

log = logging.getLogger(__name__)

_STOPPED = "the service was stopped while the new workers loaded"
# Settings that change the vectors of a text.
_VECTOR_KEYS = ("model", "backend", "dtype", "normalize", "max_input_tokens", "options")

OnChange = Callable[[str, str, str], None]
"""Called with a model, `started`, `stopped` or `failed`, and the details in words."""


class WorkerNeeds(NamedTuple):
    """Device bytes of a worker, estimated before it is loaded: its weights, and its largest passes."""

    weight_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerBuilder:
    """Builds workers, not started. `needs` reads files or asks the hub. Both raise ConfigError."""

    build: Callable[[Config, WorkerModel], Embedder]
    needs: Callable[[WorkerModel], Awaitable[WorkerNeeds]]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The workers that a change starts and ends.

    `reserved_bytes` are taken out of the quotas while the new workers load, of at most `reservable_bytes`.
    """

    config: Config
    started: Mapping[str, WorkerModel]
    removed: tuple[str, ...]
    replaced: tuple[str, ...]
    needs: Mapping[str, WorkerNeeds]
    reserved_bytes: int
    reservable_bytes: int

    def to_json(self) -> dict[str, object]:
        """What happens to each model, and the memory that it takes."""
        models: dict[str, object] = {
            name: {"action": "replace" if name in self.replaced else "start", **self.needs[name]._asdict()}
            for name in self.started
        }
        return {
            "models": models | {name: {"action": "stop"} for name in self.removed},
            "reserved_bytes": self.reserved_bytes,
            "reservable_bytes": self.reservable_bytes,
        }


class WorkerReplacement:
    """Starts, switches and ends the workers in `encoders`; one change at a time, which its caller ensures.

    Workers that are leaving end by themselves. `on_change` is called when a worker has been started or
    stopped, or has not loaded.
    """

    def __init__(self, config: Config, encoders: EncoderRegistry, builder: WorkerBuilder) -> None:
        self.on_change: OnChange = lambda model, state, text: None
        self._encoders = encoders
        self._builder = builder
        self._models: dict[Embedder, WorkerModel] = {
            encoders[model.served_name]: model for model in config.models.encoders
        }
        self._weights: dict[Embedder, int] = {}
        self._planned_weights: int | None = None
        self._loading: dict[Embedder, WorkerNeeds] = {}
        self._progress: StartProgress | None = None
        self._load: asyncio.Task[dict[str, Embedder]] | None = None
        self._departures: dict[Embedder, asyncio.Task[None]] = {}
        self._is_stopped = False

    def attach(self, memory: WorkerReserve, decide: Callable[[], None]) -> None:
        """Names where memory is reserved, and what decides waiting requests when there is more of it."""
        self._memory, self._decide = memory, decide

    def to_json(self) -> dict[str, object]:
        """Workers that load, with their stages, and those that are leaving, with their requests."""
        return {
            "loading": None if self._progress is None else self._progress.to_json(),
            "leaving": [
                {"model": worker.model, "requests": self._encoders.bound_requests(worker)}
                for worker in self._encoders.leaving
            ],
            "reserved_bytes": self._reserved_bytes(),
        }

    async def plan(self, before: Config, after: Config) -> WorkerPlan | None:
        """The workers that differ; None if none does. Raises ConfigError if the new ones do not fit."""
        former = {model.served_name: model for model in before.models.encoders}
        wanted = {model.served_name: model for model in after.models.encoders}
        started = {name: model for name, model in wanted.items() if model != former.get(name)}
        removed = tuple(name for name in former if name not in wanted)
        if not started and not removed:
            return None
        _require_same_vectors(after, former, wanted)
        await self._weigh_present()
        needs = {name: await self._needs(model) for name, model in started.items()}
        if self._departures and self._reserved_bytes(needs.values()) > self._memory.reservable:
            # What the workers of the last change hold is free when they have ended.
            await asyncio.wait(self._departures.values())
        reserved, most = self._reserved_bytes(needs.values()), self._memory.reservable
        if started and reserved > most:
            raise ConfigError(
                f"models.embeddings and models.rerankers ({', '.join(started)}): loading beside the present "
                f"workers takes {reserved:,} bytes (weights {sum(n.weight_bytes for n in needs.values()):,}, "
                f"passes {sum(n.workspace_bytes for n in needs.values()):,}) and quota.embedding has "
                f"{max(0, most):,}; lower batch_tokens, remove a model first, or restart"
            )
        replaced = tuple(name for name in started if name in former)
        return WorkerPlan(after, started, removed, replaced, needs, reserved, most)

    async def start(self, plan: WorkerPlan) -> dict[str, Embedder]:
        """Reserves memory and loads the new workers, by name; nothing is left of them after an error.

        Raises ConfigError, BackendDown.
        """
        if self._is_stopped:
            raise BackendDown("the service is stopping; make the change in the file", is_permanent=True)
        self._load = load = asyncio.create_task(self._load_all(plan))
        try:
            loaded = await load
            if self._is_stopped:
                # The load ended in the iteration of the event loop in which the service was stopped.
                await self.abandon(loaded)
                raise BackendDown(_STOPPED, is_permanent=True)
            return loaded
        except asyncio.CancelledError:
            # The caller may be cancelled in the iteration of the event loop in which the load ends.
            if load.done() and not load.cancelled() and load.exception() is None:
                await self.abandon(load.result())
            if self._is_stopped:
                raise BackendDown(_STOPPED, is_permanent=True) from None
            raise
        finally:
            self._load = None

    async def _load_all(self, plan: WorkerPlan) -> dict[str, Embedder]:
        workers: dict[str, Embedder] = {}
        try:
            for name, model in plan.started.items():
                workers[name] = worker = self._builder.build(plan.config, model)
                self._loading[worker], self._models[worker] = plan.needs[name], model
            await self._memory.reserve(self._reserved_bytes())
            self._progress = StartProgress()
            await self._progress.run({name: worker.start for name, worker in workers.items()})
            after = self.after(plan, workers)
            self._memory.require_room(after, self._excess(sum(map(self._weight, after))))
        except BaseException as error:
            for name in workers:
                self.on_change(name, "failed", str(error) or "the change was cancelled")
            await self.abandon(workers)
            raise
        finally:
            self._progress = None
        return workers

    async def abandon(self, workers: Mapping[str, Embedder]) -> None:
        """Stops those of `workers` that were not switched to, and frees their memory."""
        unused = [worker for worker in workers.values() if worker in self._loading]
        try:
            await asyncio.gather(*(worker.stop() for worker in unused))
        finally:
            for worker in unused:
                del self._loading[worker], self._models[worker]
            self._memory.release(self._reserved_bytes())
            self._decide()

    def after(self, plan: WorkerPlan, workers: Mapping[str, Embedder]) -> list[Embedder]:
        """The workers that new requests go to after the change."""
        return [
            *(each for name, each in self._encoders.items() if name not in plan.removed + plan.replaced),
            *workers.values(),
        ]

    def switch(self, plan: WorkerPlan, workers: Mapping[str, Embedder]) -> None:
        """Sends new requests to the new workers; waits for nothing."""
        rerankers = {name for name, model in plan.started.items() if isinstance(model, RerankerModel)}
        gone = self._encoders.switch(
            {name: worker for name, worker in workers.items() if name not in rerankers},
            {name: cast("Reranker", worker) for name, worker in workers.items() if name in rerankers},
            plan.removed,
        )
        for worker in workers.values():
            self._weights[worker] = self._loading.pop(worker).weight_bytes
        self._memory.release(self._reserved_bytes())
        for worker in gone:
            task = asyncio.create_task(self._depart(worker), name=f"leaving-{worker.model}")
            self._departures[worker] = task
            task.add_done_callback(partial(self._departed, worker))

    def announce(self, plan: WorkerPlan) -> None:
        """Reports the started workers, once the configuration that has them is in force."""
        for name in plan.started:
            self.on_change(name, "started", "new requests go to its new worker")

    async def cancel_loading(self) -> None:
        """Ends a change under way; none begins any more."""
        self._is_stopped = True
        if (load := self._load) is not None:
            load.cancel()
            await asyncio.wait([load])

    async def stop(self) -> None:
        """Ends the workers that are leaving."""
        tasks = list(self._departures.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._encoders.leaving))

    async def _depart(self, worker: Embedder) -> None:
        await self._encoders.until_unbound(worker)
        await worker.stop()

    def _departed(self, worker: Embedder, task: asyncio.Task[None]) -> None:
        """Frees the memory of a worker that has left; one that failed to stop has no process either."""
        del self._departures[worker]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("the worker of %s failed to stop: %r", worker.model, error, exc_info=error)
        self._encoders.stopped(worker)
        self._models.pop(worker, None)
        self._weights.pop(worker, None)
        self._memory.release(self._reserved_bytes())
        self._decide()
        log.info("%s: its former worker has answered its requests and was stopped", worker.model)
        self.on_change(worker.model, "stopped", "its former worker has answered its requests")

    async def _weigh_present(self) -> None:
        """Finds the weights of the workers of the start, which the memory plan has room for."""
        if self._planned_weights is None:
            for worker in self._encoders.values():
                needs = await self._builder.needs(self._models[worker])
                self._weights[worker] = needs.weight_bytes
            self._planned_weights = sum(self._weights.values())

    async def _needs(self, model: WorkerModel) -> WorkerNeeds:
        """The estimate, or what a running worker of the same model has measured, for passes of this size."""
        needs = await self._builder.needs(model)
        for worker, other in self._models.items():
            if worker in self._weights and _computes_alike(model, other):
                longest = worker.max_input_tokens
                growth = max(longest, model.batch_tokens) / max(longest, other.batch_tokens)
                return needs._replace(workspace_bytes=round(worker.workspace_bytes * max(1.0, growth)))
        return needs

    def _weight(self, worker: Embedder) -> int:
        loading = self._loading.get(worker)
        return self._weights[worker] if loading is None else loading.weight_bytes

    def _excess(self, weights: int) -> int:
        """Bytes of weights beyond those of the memory plan; 0 until a change has weighed the workers."""
        return 0 if self._planned_weights is None else max(0, weights - self._planned_weights)

    def _reserved_bytes(self, more: Collection[WorkerNeeds] = ()) -> int:
        """Bytes that no batch may take: weights beyond the plan's, and passes of workers that load."""
        loading = [*self._loading.values(), *more]
        weights = sum(self._weights.values()) + sum(needs.weight_bytes for needs in loading)
        return self._excess(weights) + sum(needs.workspace_bytes for needs in loading)


def _computes_alike(model: WorkerModel, other: WorkerModel) -> bool:
    """Whether passes of both take the same memory."""
    keys = ("model", "dtype", "device", "max_input_tokens", "threads")
    return type(model) is type(other) and all(getattr(model, key) == getattr(other, key) for key in keys)


def _require_same_vectors(
    after: Config, former: Mapping[str, WorkerModel], wanted: Mapping[str, WorkerModel]
) -> None:
    """Raises ConfigError if the vectors change that the length predictor learns from."""
    name = after.predictors.encoder
    before, then = former.get(name or ""), wanted.get(name or "")
    if not isinstance(before, EmbeddingModel) or not isinstance(then, EmbeddingModel):
        return
    for key in _VECTOR_KEYS:
        if getattr(before, key) != getattr(then, key):
            raise ConfigError(
                f"models.embeddings ({name}).{key}={getattr(then, key)!r}: predictors.encoder has learned "
                f"from the vectors of {getattr(before, key)!r}; add the model under another name, or restart"
            )
