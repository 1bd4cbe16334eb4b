"""The linear program of the bound: what each time slot offers, and the least work of requests within it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.judge.hindsight.least_work import RequestWork
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from controlplane.core.memory_ledger import Floats

Slots = npt.NDArray[np.int_]


@dataclass(slots=True)
class ProgramRows:
    """Rows of the program, as coordinates and values of their entries."""

    limits: list[float] = field(default_factory=list)
    entries: list[tuple[Floats, Floats, Floats]] = field(default_factory=list)

    def new(self, count: int, limit: Floats | float) -> Floats:
        """Numbers of `count` new rows with this limit."""
        first = len(self.limits)
        self.limits.extend(np.broadcast_to(np.asarray(limit, dtype=float), count).tolist())
        return np.arange(first, first + count, dtype=float)

    def add(self, rows: Floats | float, columns: Floats | float, values: Floats | float) -> None:
        """Adds entries; the arguments are broadcast to one shape."""
        row, column, value = np.broadcast_arrays(
            np.atleast_1d(rows), np.atleast_1d(columns), np.atleast_1d(values)
        )
        self.entries.append((row.ravel(), column.ravel(), value.ravel()))

    def matrix(self, width: int) -> object:
        """The rows as a sparse matrix."""
        from scipy.sparse import coo_matrix

        if not self.entries:
            return coo_matrix((0, width))
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        shape = (len(self.limits), width)
        return coo_matrix((values, (rows.astype(int), columns.astype(int))), shape=shape).tocsr()


class SlotProgram:
    """The program under construction: what each slot offers, then requests one by one."""

    def __init__(self, device: SimulatedDeviceSection, edges: Floats) -> None:
        self.at_most, self.equal = ProgramRows(), ProgramRows()
        self.width = 0
        self.upper: list[Floats] = []
        self._device = device
        self._edges = edges
        self._slots = len(edges) - 1
        kv_bytes = device.kv_memory or device.pool
        block_bytes = BLOCK_TOKENS * device.kv_bytes_per_token
        count, rows = self._slots, self.at_most
        steps, passes = self._columns(count), self._columns(count)
        self._steps = steps
        self._time = rows.new(count, np.diff(edges))
        rows.add(self._time, steps, device.step[0])
        rows.add(self._time, passes, device.embedding[0])
        self._sequences = rows.new(count, 0.0)
        rows.add(self._sequences, steps, -device.max_running)
        self._tokens = rows.new(count, 0.0)
        rows.add(self._tokens, steps, -device.step_tokens)
        self._padded = rows.new(count, 0.0)
        rows.add(self._padded, passes, -device.embed_batch_tokens)
        # Of all limits on memory: (rows, units of a block, units of a token in a pass).
        self._memory: list[tuple[Floats, float, float]] = []
        if kv_bytes is not None:
            own = rows.new(count, 0.0)
            rows.add(own, steps, -(kv_bytes // block_bytes))
            self._memory.append((own, 1.0, 0.0))
        if device.pool is not None:
            # A pass may follow the LLM's part of a step or be a step of its own.
            shared = rows.new(count, 0.0)
            rows.add(shared, steps, -device.pool / block_bytes)
            rows.add(shared, passes, -device.pool / block_bytes)
            self._memory.append((shared, 1.0, device.embed_bytes_per_token / block_bytes))

    def costs(self, served: Sequence[int]) -> Floats:
        """Costs of the program that maximises the sum of these columns."""
        costs = np.zeros(self.width)
        costs[served] = -1.0
        return costs

    def add_order(self, later: int, earlier: int | None) -> None:
        """Serves no larger part of `later` than of `earlier`; None is never served."""
        row = self.at_most.new(1, 0.0)
        self.at_most.add(row, later, 1.0)
        if earlier is not None:
            self.at_most.add(row, earlier, -1.0)

    def add_request(self, work: RequestWork) -> int:
        """Adds the columns of a request; returns that of the part served."""
        served = self._columns(1, np.ones(1))
        if work.tokens:
            self._add_embedding(work, served)
        else:
            self._add_prompt(work, served)
            if work.decodes:
                self._add_decodes(work, served)
        return int(served[0])

    def _add_embedding(self, work: RequestWork, served: Floats) -> None:
        base = self._device.embedding[0]
        seconds = work.pass_seconds + base * work.tokens / self._device.embed_batch_tokens
        slots, columns = self._spread(work.release, work.due, seconds, served, 1.0)
        self.at_most.add(self._time[slots], columns, work.pass_seconds)
        self.at_most.add(self._padded[slots], columns, work.tokens)
        for rows, _, units in self._memory:
            if units:
                self.at_most.add(rows[slots], columns, work.tokens * units)

    def _add_prompt(self, work: RequestWork, served: Floats) -> None:
        base, per_prompt, _, _ = self._device.step
        steps = work.prompt / self._device.step_tokens
        seconds = base * steps + per_prompt * work.prompt
        slots, columns = self._spread(work.release, work.first_due, seconds, served, 1.0)
        self.at_most.add(self._time[slots], columns, work.prompt * per_prompt)
        self.at_most.add(self._sequences[slots], columns, steps)
        self.at_most.add(self._tokens[slots], columns, work.prompt)
        for rows, units, _ in self._memory:
            self.at_most.add(rows[slots], columns, units * work.prompt / BLOCK_TOKENS)
        # As many steps as tokens within the window, in which one token comes of each.
        inside = self._inside(work.release, work.due)
        row = self.at_most.new(1, 0.0)
        self.at_most.add(row, self._steps[inside], -1.0)
        self.at_most.add(row, served, ceil(steps) + work.decodes)

    def _add_decodes(self, work: RequestWork, served: Floats) -> None:
        """Tokens after the first as parts of their number, with the least blocks and time of each.

        What the tokens take beyond that is spread in columns of its own, blocks only over slots with tokens.
        """
        base, _, _, per_cell = self._device.step
        count, read = work.decodes, per_cell * BLOCK_TOKENS
        least = work.cheapest_decode + read * (work.fewest_blocks + work.shared - 1)
        slots, columns = self._spread(work.release, work.due, count * (base + least), served, 1.0)
        self.at_most.add(self._time[slots], columns, count * least)
        self.at_most.add(self._sequences[slots], columns, count)
        self.at_most.add(self._tokens[slots], columns, count)
        for rows, units, _ in self._memory:
            self.at_most.add(rows[slots], columns, units * count * work.fewest_blocks)
        if more := work.block_steps - count * work.fewest_blocks:
            _, further = self._spread(work.release, work.due, 0.0, served, more)
            self.at_most.add(self._time[slots], further, read)
            for rows, units, _ in self._memory:
                self.at_most.add(rows[slots], further, units)
            link = self.at_most.new(len(slots), 0.0)
            self.at_most.add(link, further, 1.0)
            self.at_most.add(link, columns, -count * (work.most_blocks - work.fewest_blocks))
        if (longer := work.decode_seconds - count * work.cheapest_decode) > 0:
            _, further = self._spread(work.release, work.due, 0.0, served, longer)
            self.at_most.add(self._time[slots], further, 1.0)

    def _spread(
        self, start: float, end: float, seconds: float, served: Floats, amount: float
    ) -> tuple[Slots, Floats]:
        """Slots of a window, and a column for each: they sum to `amount` times the part served.

        `seconds` is the least time that the whole takes, which limits what fits into a slot.
        """
        slots = self._inside(start, end)
        overlap = np.minimum(end, self._edges[slots + 1]) - np.maximum(start, self._edges[slots])
        limit = np.full(len(slots), np.inf) if seconds <= 0 else np.maximum(0.0, overlap) / seconds
        columns = self._columns(len(slots), limit)
        row = self.equal.new(1, 0.0)
        self.equal.add(row, columns, 1.0)
        self.equal.add(row, served, -amount)
        return slots, columns

    def _inside(self, start: float, end: float) -> Slots:
        """Slots that overlap a window."""
        first = int(np.searchsorted(self._edges, start, side="right")) - 1
        last = int(np.searchsorted(self._edges, end, side="left"))
        return np.arange(max(0, first), min(self._slots, max(last, first + 1)))

    def _columns(self, count: int, upper: Floats | float = np.inf) -> Floats:
        """Numbers of `count` new columns with these upper limits."""
        first, self.width = self.width, self.width + count
        self.upper.append(np.broadcast_to(np.asarray(upper, dtype=float), count))
        return np.arange(first, first + count, dtype=float)
