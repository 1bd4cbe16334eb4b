"""The simulated engine and vLLM's real scheduler take the same course through the same requests."""

from dataclasses import dataclass, field
from random import Random

import pytest

from backends.cost_models.step_time import StepLoad, affine, llm_only
from backends.simulated.continuous_batching import RankedScheduler, SimulatedScheduler
from backends.simulated.policy_scheduler import PolicyScheduler, PolicySequence
from backends.vllm.plugin.request_metadata import Defaults, make_engine_request, metadata_of
from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Handoff
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import ENGINE_POLICIES

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

BLOCKS, BLOCK_TOKENS, MOST_RUNNING, STEP_TOKENS, LONGEST = 48, 16, 12, 256, 512
SIZES = {"block_tokens": BLOCK_TOKENS, "max_running": MOST_RUNNING, "step_tokens": STEP_TOKENS}
# Prompt tokens and decodes cost the same: the engines count the last token of a prompt differently.
STEP_TIME = llm_only(affine(0.02, 2e-4, 2e-4, 0))
QUOTAS = {60: 30, 140: 20, 260: 48}
"""Quota in blocks from each of these steps on."""
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


@dataclass(frozen=True, slots=True)
class Arriving:
    """One request of the trace."""

    request: Request
    output: int
    rank: int
    forecast: LengthForecast | None
    prompt: list[int]

    @property
    def metadata(self):
        return metadata_of(self.request, Handoff(self.rank, forecast=self.forecast))


@dataclass(slots=True)
class Course:
    """What one engine did: time of each token, running requests in each step, preemptions by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    batches: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    preemptions: dict[str, int] = field(default_factory=dict)


def trace(seed: int, count: int = 150) -> list[Arriving]:
    """Requests that share prefixes where the engine has a prefix cache."""
    random, tokens, at, found = Random(seed), Random(-1 - seed), 0.0, []
    urgent = Slo(milliseconds(1_500), milliseconds(60))
    classes = [ServiceClass("chat", urgent, 2, True), ServiceClass("jobs", Slo(), 0, False)]
    for number in range(count):
        at += random.expovariate(3.5)
        chosen, output = random.choice(classes), random.randint(2, 120)
        guess = sorted(max(1.0, output * random.uniform(0.5, 2)) for _ in range(3))
        forecast = LengthForecast((0.0, 0.5, 1.0), tuple(guess)) if random.random() < 0.8 else None
        prompt = random.randint(2, 300)
        request = Request(
            f"r{number:03d}", Kind.GENERATE, "m", "t", chosen, chosen.slo, Instant(seconds(at)), prompt, 150
        )
        # Of requests with equal rank and arrival vLLM starts the one with the smaller id.
        rank, shared = random.randint(-999, 999), tokens.randint(0, prompt - 1)
        ids = [tokens.randrange(3)] * shared + tokens.choices(range(10, 2_000), k=prompt - shared)
        found.append(Arriving(request, output, rank, forecast, ids))
    return found


class Simulated:
    """The simulated engine on a clock of its own."""

    def __init__(self, scheduler: SimulatedScheduler[PolicySequence], *, shares_prefixes: bool) -> None:
        self.now, self._engine, self._shares_prefixes = 0, scheduler, shares_prefixes
        self._policy = scheduler if isinstance(scheduler, PolicyScheduler) else None
        self._names: dict[PolicySequence, str] = {}

    def add(self, arriving: Arriving) -> None:
        request = arriving.request
        sequence = PolicySequence(request.prompt_tokens, arriving.output, arrived=self.now)
        if self._shares_prefixes:
            sequence.know_tokens(arriving.prompt, BLOCK_TOKENS)
        if self._policy is None:
            sequence.rank = arriving.rank
        else:
            sequence.state = make_engine_request(
                arriving.metadata, Defaults(), request_id=request.id, prompt_tokens=request.prompt_tokens,
                max_tokens=request.max_output_tokens, now=Instant(self.now),
            )  # fmt: skip
        self._names[sequence] = request.id
        self._engine.add(sequence)

    def jump(self, to: int) -> None:
        self.now = max(self.now, to)

    def set_quota(self, blocks: int) -> None:
        if self._policy is not None:
            self._policy.set_quota(blocks, blocks)

    def step(self) -> list[str]:
        load = StepLoad()
        if self._policy is not None:
            self._policy.observe_step(Instant(self.now), is_alone=True)
            self._policy.arrange(Instant(self.now))
        if not self._engine.plan(load):
            return []
        self.now += round(STEP_TIME(load) * 1e9)
        return [self._names[sequence] for sequence in self._engine.complete()]

    def running(self) -> tuple[str, ...]:
        return tuple(self._names[sequence] for sequence in self._engine.running)

    def preemptions(self) -> dict[str, int]:
        return {name: sequence.preemptions for sequence, name in self._names.items()}


class Real:
    """vLLM's scheduler in a stepped engine."""

    def __init__(self, stepped, scheduler) -> None:
        self._stepped, self._scheduler = stepped, scheduler
        self._preempted: dict[str, int] = {}
        preempt = scheduler._preempt_request

        def count(request, *args, **kwargs) -> None:
            self._preempted[request.request_id] = self._preempted.get(request.request_id, 0) + 1
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = count

    @property
    def now(self) -> int:
        return self._stepped.now_ns

    def add(self, arriving: Arriving) -> None:
        request = arriving.request
        self._preempted.setdefault(request.id, 0)
        self._stepped.add(
            request.id, request.prompt_tokens, arriving.output, extra={"tandem": arriving.metadata},
            priority=arriving.rank, limit=request.max_output_tokens, prompt=arriving.prompt,
        )  # fmt: skip

    def jump(self, to: int) -> None:
        self._stepped.jump(to)

    def set_quota(self, blocks: int) -> None:
        if hasattr(self._scheduler, "set_quota"):
            self._scheduler.set_quota(blocks)

    def step(self) -> list[str]:
        return [name for name, tokens, _ in self._stepped.step() if tokens]

    def running(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self._scheduler.running)

    def preemptions(self) -> dict[str, int]:
        return self._preempted


def course(engine: Simulated | Real, arriving: list[Arriving]) -> Course:
    """Steps the engine until every request has all its tokens."""
    found, left, steps, missing = Course(), list(arriving), 0, {a.request.id: a.output for a in arriving}
    while missing:
        while left and left[0].request.arrival <= engine.now:
            engine.add(left.pop(0))
        if len(missing) == len(left):
            engine.jump(left[0].request.arrival)
            continue
        if (quota := QUOTAS.get(steps)) is not None:
            engine.set_quota(quota)
        for name in engine.step():
            found.tokens.setdefault(name, []).append(engine.now)
            missing[name] -= 1
            if not missing[name]:
                del missing[name]
        found.batches.append((engine.now, engine.running()))
        steps += 1
        assert steps < 20_000
    found.preemptions = engine.preemptions()
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "shared"])
def stepped(request):
    from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

    engine = SteppedEngine(
        SteppedEngineSetup(
            blocks=BLOCKS, block_tokens=BLOCK_TOKENS, max_model_tokens=LONGEST, max_running=MOST_RUNNING,
            max_step_tokens=STEP_TOKENS, shares_prefixes=request.param,
        )
    )  # fmt: skip
    engine._executor._batch_time = STEP_TIME
    return engine


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ordering", sorted(ENGINE_POLICIES))
def test_a_policy_takes_the_same_course(stepped, ordering, seed):
    real = course(Real(stepped, stepped.restart(tandem={"ordering": ordering})), trace(seed))
    options = EngineOptions(ordering=ordering)
    simulated = PolicyScheduler(options, blocks=BLOCKS, **SIZES)
    found = course(Simulated(simulated, shares_prefixes=stepped.setup.shares_prefixes), trace(seed))
    assert found == real
    assert sum(real.preemptions.values()) > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("policy", "scheduler"), [("fcfs", SimulatedScheduler), ("priority", RankedScheduler)]
)
def test_stock_scheduling_takes_the_same_course(stepped, policy, scheduler, seed):
    real = course(Real(stepped, stepped.restart(stock=policy)), trace(seed))
    simulated = scheduler(blocks=BLOCKS, reserves_prompts=True, **SIZES)
    found = course(Simulated(simulated, shares_prefixes=stepped.setup.shares_prefixes), trace(seed))
    assert found == real
    assert sum(real.preemptions.values()) > 0
