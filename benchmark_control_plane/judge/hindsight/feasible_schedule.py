"""A schedule with hindsight that the simulated device could run: what it attains is attainable.

It knows lengths and step times and never preempts: a request starts if memory suffices until each running one
ends and the step leaves the others in time. A request that can no longer be in time is dropped. Prompts are
computed whole, without a prefix cache. The best of a few rules counts: the request that must start first goes
first, or the one of least work; all running requests stay in time, or a twentieth of them may become late;
all requests are tried, or those that the linear program serves.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from benchmark_control_plane.judge.hindsight.attainment_bound import bound_of_parts
from benchmark_control_plane.judge.hindsight.least_work import RequestWork
from benchmark_control_plane.judge.hindsight.started_requests import StartCheck, StartedRequest
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from controlplane.core.memory_ledger import Floats
from controlplane.core.request import Kind

_CHOSEN_PART = 0.5
_SACRIFICED = (0.0, 0.05)
# Requests that are tried at a step, beyond the first that does not fit.
_TRIED = 8


def feasible_attainment(works: Sequence[RequestWork], device: SimulatedDeviceSection, parts: Floats) -> float:
    """Share of the requests that the best of a few schedules serves; `parts` is the program's solution."""
    if not works:
        return 1.0
    everyone = frozenset(work.planned.id for work in works if work.is_possible)
    chosen = frozenset(w.planned.id for w, part in zip(works, parts, strict=True) if part >= _CHOSEN_PART)
    rules = [(order, sacrificed) for order in (_latest_start, _alone) for sacrificed in _SACRIFICED]
    most = int(bound_of_parts(parts) * len(works))
    best, best_rule = frozenset[str](), rules[0]
    for rule in rules:
        found = served_in_time(works, device, everyone, *rule)
        if len(found) >= most:
            return len(found) / len(works)
        if len(found) > len(best):
            best, best_rule = found, rule
    further = served_in_time(works, device, chosen, *best_rule)
    return max(len(best), len(further)) / len(works)


def served_in_time(
    works: Sequence[RequestWork],
    device: SimulatedDeviceSection,
    chosen: Collection[str],
    order: Callable[[RequestWork], float],
    sacrificed: float,
) -> frozenset[str]:
    """Ids of the requests served in time if only those with the ids `chosen` are served."""
    return _Schedule(device, works, chosen, order, sacrificed).run()


@dataclass(eq=False, slots=True)
class _Call:
    """An embedding request with the inputs of no pass yet, shortest first, and their `seconds` alone."""

    work: RequestWork
    lengths: list[int]
    seconds: float = 0.0


@dataclass(slots=True)
class _Schedule:
    """One schedule, step by step from the first release."""

    device: SimulatedDeviceSection
    works: Sequence[RequestWork]
    chosen: Collection[str]
    order: Callable[[RequestWork], float]
    sacrificed: float
    now: float = 0.0
    kept: list[str] = field(default_factory=list)
    running: list[StartedRequest] = field(default_factory=list)
    prompts: list[RequestWork] = field(default_factory=list)
    inputs: list[_Call] = field(default_factory=list)
    first_lapse: float = inf
    """Until then no request of `prompts` is too late to start."""
    blocks: int | None = field(init=False)
    """Blocks of the KV cache; None is no limit."""

    def __post_init__(self) -> None:
        kv_bytes = self.device.kv_memory or self.device.pool
        block_bytes = BLOCK_TOKENS * self.device.kv_bytes_per_token
        self.blocks = None if kv_bytes is None else kv_bytes // block_bytes

    def run(self) -> frozenset[str]:
        """Ids of the requests served in time."""
        to_come = sorted(
            (work for work in self.works if work.planned.id in self.chosen), key=lambda w: -w.release
        )
        followers: dict[str, list[RequestWork]] = {}
        for work in to_come:
            if work.planned.after is not None:
                followers.setdefault(work.planned.after, []).append(work)
        to_come = [work for work in to_come if work.planned.after is None]
        self.now = to_come[-1].release if to_come else 0.0
        while to_come or self.running or self.prompts or self.inputs:
            while to_come and to_come[-1].release <= self.now:
                self._arrive(to_come.pop())
            self._drop_late()
            kept = len(self.kept)
            if not self._step():
                if not to_come:
                    break
                self.now = max(self.now, to_come[-1].release)
            for done in self.kept[kept:]:
                for follower in followers.get(done, ()):
                    self._arrive(follower if follower.before else _due_from(follower, self.now))
        return frozenset(self.kept)

    def _arrive(self, work: RequestWork) -> None:
        if work.planned.kind is Kind.EMBED:
            call = _Call(work, sorted(work.planned.lengths))
            call.seconds = self._alone(call.lengths)
            insort(self.inputs, call, key=lambda each: self.order(each.work))
        else:
            insort(self.prompts, work, key=self.order)
            self.first_lapse = min(self.first_lapse, _latest_start(work))

    def _drop_late(self) -> None:
        """Drops what can no longer be in time, and the latest started while the next step lacks blocks."""
        if self.first_lapse < self.now:
            self.prompts = [work for work in self.prompts if _latest_start(work) >= self.now]
            self.first_lapse = min(map(_latest_start, self.prompts), default=inf)
        self.inputs = [call for call in self.inputs if self.now + call.seconds <= call.work.due]
        least = self.device.step[0]
        slacks = self._slacks(self.running, 1)
        if min(slacks, default=inf) < least:
            kept = zip(self.running, slacks, strict=True)
            self.running = [one for one, slack in kept if slack >= least]
        while self.blocks is not None and sum([one.blocks for one in self.running]) > self.blocks:
            self.running.pop()

    def _step(self) -> bool:
        """Runs one step; False if there is nothing to do."""
        base, per_prompt, per_decode, per_cell = self.device.step
        budget, chunks = self.device.step_tokens, []
        seconds = 0.0
        for one in sorted(self.running, key=lambda one: not one.produced):
            chunk = min(budget, 1 if one.produced else one.prompt - one.computed)
            if chunk:
                seconds += (per_decode if one.produced else chunk * per_prompt) + per_cell * one.computed
                chunks.append((one, chunk))
                budget -= chunk
        if chunks:
            seconds += base
        slack = self._least_slack(chunks)
        if started := self._start(budget, slack - seconds):
            for one, chunk in started:
                seconds += (0.0 if chunks else base) + chunk * per_prompt
                chunks.append((one, chunk))
            slack = self._least_slack(chunks)
        took, computed = self._compose_pass(slack - seconds)
        self.now += seconds + took
        self.kept += [work.planned.id for work in computed if self.now <= work.due]
        self._finish(chunks)
        return bool(chunks) or took > 0

    def _least_slack(self, chunks: Sequence[tuple[StartedRequest, int]]) -> float:
        slacks = self._slacks([one for one, _ in chunks], len(self.running))
        if not slacks:
            return inf
        left_out = int(self.sacrificed * len(slacks))
        return sorted(slacks)[left_out] if left_out else min(slacks)

    def _slacks(self, ones: Iterable[StartedRequest], decodes: int) -> list[float]:
        """Time that the next step of each request may take, if so many decode in each later one."""
        base, _, per_decode, per_cell = self.device.step
        now, found = self.now, []
        step = base + per_decode * decodes
        for one in ones:
            if one.produced:
                whole = one.due - (one.left - 1) * (step + per_cell * one.computed)
                next_due = one.next_due
                found.append((whole if whole < next_due else next_due) - now)
            else:
                work = one.work
                found.append(min(work.first_due, work.due - base * (one.left - 1)) - now)
        return found

    def _start(self, budget: int, slack: float) -> list[tuple[StartedRequest, int]]:
        """Starts waiting requests whose prompts fit into tokens, time and memory."""
        started: list[tuple[StartedRequest, int]] = []
        check: StartCheck | None = None
        tried, (base, per_prompt, _, _) = 0, self.device.step
        for work in list(self.prompts):
            if not budget or len(self.running) >= self.device.max_running or tried > _TRIED:
                break
            chunk = min(budget, work.planned.prompt_tokens)
            if chunk * per_prompt > slack:
                tried += 1
                continue
            check = check or StartCheck(self.running, self.device, self.blocks)
            one = StartedRequest(work)
            if not check.may_start(one):
                tried += 1
                continue
            self.prompts.remove(work)
            self.running.append(one)
            started.append((one, chunk))
            check = None
            budget -= chunk
            slack = min(slack, work.first_due - self.now - base) - chunk * per_prompt
        return started

    def _compose_pass(self, slack: float) -> tuple[float, list[RequestWork]]:
        """Takes the inputs of a pass after the LLM's part of the step that fits into `slack` seconds.

        Returns its time and the requests that it completes.
        """
        completed: list[RequestWork] = []
        if not self.inputs:
            return 0.0, completed
        budget, longest, count = self._pass_tokens(), 0, 0
        while self.inputs:
            call = self.inputs[0]
            while lengths := call.lengths:
                length = max(longest, lengths[-1])
                is_whole = (count + 1) * length <= budget
                if not is_whole or self._pass_time(count + 1, length) > slack:
                    call.seconds = self._alone(lengths)
                    return self._pass_time(count, longest), completed
                longest, count = max(longest, lengths.pop()), count + 1
            completed.append(self.inputs.pop(0).work)
        return self._pass_time(count, longest), completed

    def _pass_tokens(self) -> int:
        """Padded tokens of the largest pass, beside the blocks held now and those of this step."""
        if self.device.pool is None:
            return self.device.embed_batch_tokens
        held = sum([one.blocks for one in self.running])
        free = self.device.pool - held * BLOCK_TOKENS * self.device.kv_bytes_per_token
        return min(self.device.embed_batch_tokens, free // self.device.embed_bytes_per_token)

    def _pass_time(self, inputs: int, length: int) -> float:
        base, per_token = self.device.embedding
        padded = inputs * length
        return base + padded * (per_token + self.device.embedding_squares * length) if inputs else 0.0

    def _alone(self, lengths: Sequence[int]) -> float:
        """Seconds of the passes of these inputs alone, shortest first."""
        longest, base = lengths[-1] if lengths else 0, self.device.embedding[0]
        further = -(-len(lengths) * longest // self.device.embed_batch_tokens) - 1
        return self._pass_time(len(lengths), longest) + base * max(0, further)

    def _finish(self, chunks: Sequence[tuple[StartedRequest, int]]) -> None:
        """Delivers the tokens of the step that ends now."""
        for one, chunk in chunks:
            one.computed += chunk
            if one.computed < one.prompt:
                continue
            work = one.work
            if not one.produced:
                is_late = self.now > work.first_due
                one.due = -inf if is_late else min(self.now + work.after_first, work.due)
            one.produced, one.left = one.produced + 1, one.left - 1
            one.next_due = self.now + work.longest_gap
            if not one.left:
                self.running.remove(one)
                if self.now <= one.due:
                    self.kept.append(work.planned.id)


def _latest_start(work: RequestWork) -> float:
    return min(work.first_due - work.first_alone, work.due - work.alone)


def _due_from(work: RequestWork, now: float) -> RequestWork:
    """A request whose latencies count from now, because it follows a response."""
    first_due = min(work.first_due, now + work.first_within)
    due = min(work.due, now + work.within, first_due + work.after_first)
    return replace(work, release=now, first_due=min(first_due, due), due=due)


def _alone(work: RequestWork) -> float:
    return work.alone
