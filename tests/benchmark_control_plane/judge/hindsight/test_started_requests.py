"""Which requests may start in a schedule with hindsight, against the use of memory token by token."""

from random import Random

from benchmark_control_plane.judge.hindsight.least_work import RequestWork
from benchmark_control_plane.judge.hindsight.started_requests import StartCheck, StartedRequest
from benchmark_control_plane.judge.simulated_target import BLOCK_TOKENS
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind

DEVICE = SimulatedDeviceSection(step=(0.02, 1e-4, 1e-3, 1e-7))
FAST_DEVICE = SimulatedDeviceSection(step=(0.001, 1e-4, 1e-5, 1e-9))


def started(random, *, produced=None):
    planned = PlannedRequest("r", 0.0, Kind.GENERATE, "chat", prompt_tokens=random.randint(1, 60))
    decodes = random.randint(0, 40)
    one = StartedRequest(
        RequestWork(planned, decodes=decodes, after_first=random.uniform(0.02, 0.03) * decodes)
    )
    one.produced = random.randint(0, decodes) if produced is None else produced
    one.left -= one.produced
    return one


def blocks_after(ones, steps):
    """Blocks just before the tokens of this step are freed."""
    return sum(-(-(one.prompt + one.produced + steps) // BLOCK_TOKENS) for one in ones if one.left >= steps)


def test_a_request_starts_if_memory_suffices_at_every_step_and_steps_stay_in_pace():
    random, answers = Random(1), set()
    for _ in range(400):
        running = [started(random) for _ in range(random.randint(0, 6))]
        newcomer = started(random, produced=0)
        ones = [*running, newcomer]
        limit = random.randint(1, 24)
        fits = max(blocks_after(ones, steps) for steps in range(1, 42)) <= limit
        cells = sum(one.prompt + one.produced for one in ones)
        step = 0.02 + 1e-3 * len(ones) + 1e-7 * cells
        paces = [one.work.after_first / one.work.decodes for one in ones if one.work.decodes]
        is_in_pace = step <= min(paces, default=1.0)
        for blocks, expected in ((limit, fits and is_in_pace), (None, is_in_pace)):
            assert StartCheck(running, DEVICE, blocks).may_start(newcomer) is expected
            answers.add((blocks is None, expected))
    assert len(answers) == 4


def test_one_check_answers_for_several_requests():
    random = Random(2)
    running = [started(random) for _ in range(4)]
    limit = max(blocks_after(running, steps) for steps in range(1, 42)) + 3
    check = StartCheck(running, FAST_DEVICE, limit)
    newcomers = [started(random, produced=0) for _ in range(50)]
    alone = [StartCheck(running, FAST_DEVICE, limit).may_start(one) for one in newcomers]
    assert [check.may_start(one) for one in newcomers] == alone
    assert len(set(alone)) == 2
