"""A dispatcher of embedding passes, with calls and a worker whose rows name their inputs."""

import numpy as np

from backends.embedding.batch_dispatcher import BatchDispatcher, PendingCall
from backends.embedding.budget import PassBudget
from backends.embedding.ipc import PassResult
from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import ObservedTime, PassTime
from controlplane.core.clock import Instant
from controlplane.core.ports import PauseCost


def budget(tokens: int, lanes: int = 1) -> PassBudget:
    memory = EmbeddingMemory(0, 10.0, 2)
    return PassBudget(tokens, lanes, memory, ObservedTime(PassTime(0.001, 1e-4, 0.0)))


class Harness:
    """Calls, and a worker that returns (first id, length) for each input."""

    def __init__(self, tokens: int, lanes: int = 1) -> None:
        self.dispatcher = BatchDispatcher()
        self.dispatcher.worker_started(budget(tokens, lanes))
        self.rows: list[np.ndarray] = []
        self.calls = []
        self.completed: list[list[Exception | None]] = []
        self.sent: dict[int, list[np.ndarray]] = {}

    def submit(self, lengths: list[int], deadline: Instant | None = None) -> None:
        number = len(self.rows)
        inputs = [np.full(n, 100 * number + i, dtype=np.uint32) for i, n in enumerate(lengths)]
        rows, completed = np.full((len(lengths), 2), -1, dtype=np.float32), []
        self.rows.append(rows)
        self.completed.append(completed)
        pending = PendingCall(inputs, rows, completed.append)
        self.calls.append(self.dispatcher.put(pending, deadline=deadline))

    def send(self, cost: PauseCost | None = None, *, starts_small: bool = True) -> None:
        while (sent := self.dispatcher.next_batch(cost, Instant(0), starts_small=starts_small)) is not None:
            self.sent[sent[0]] = sent[1]

    def answer(self, number: int) -> None:
        inputs = self.sent.pop(number)
        rows = np.array([[ids[0], len(ids)] for ids in inputs], dtype=np.float32)
        self.dispatcher.pass_finished(number, PassResult(rows, 1_000_000, 0), Instant(0))

    def finish(self) -> None:
        self.send()
        while self.sent:
            self.answer(next(iter(self.sent)))
            self.send()
