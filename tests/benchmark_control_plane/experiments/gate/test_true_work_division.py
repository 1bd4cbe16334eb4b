"""Divisions of a workflow's deadline by the true work of its stages."""

import pytest

from benchmark_control_plane.experiments.gate.true_work_division import TrueWork, divided, work_ms
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind

DEVICE = SimulatedDeviceSection(step=(0.01, 0.0, 0.0, 0.0), embedding=(0.0, 1e-3))


def workflow(name, passages, output):
    def stage(which):
        return WorkflowStage(name, which, deadline_ms=1_000)

    return [
        PlannedRequest(f"{name}-query", -1.0, Kind.EMBED, "c", lengths=(10,), stage=stage("query")),
        PlannedRequest(f"{name}-rerank", -1.0, Kind.EMBED, "c", lengths=(10,) * passages,
                       after=f"{name}-query", stage=stage("rerank")),
        PlannedRequest(f"{name}-~answer", -1.0, Kind.GENERATE, "c", prompt_tokens=4, output_tokens=output,
                       after=f"{name}-rerank", stage=stage("answer")),
    ]  # fmt: skip


def stated(requests, division, elapsed_ms=(0.0, 100.0, 200.0)):
    found = divided(requests, DEVICE, division)
    return [r.stage.stated_ms(elapsed) for r, elapsed in zip(found, elapsed_ms, strict=True)]


def test_the_work_of_a_request_is_its_time_alone_also_in_the_warm_up():
    assert work_ms(workflow("w", 9, 30), DEVICE) == pytest.approx(
        {"w-query": 10, "w-rerank": 90, "w-~answer": 300}
    )


@pytest.mark.parametrize(
    ("division", "expected"),
    [
        (TrueWork("flexibility"), [1_000 * 10 / 400, 900 * 90 / 390, 800]),
        (TrueWork("flexibility", least=0.3), [300, 270, 800]),
        (TrueWork("slack"), [10 + (1_000 - 400) / 3, 90 + (900 - 390) / 2, 800]),
        (TrueWork("effective"), [1_000 - 390, 900 - 300, 800]),
        (TrueWork("effective", times=2), [1_000 - 780, 900 - 600, 800]),
    ],
)
def test_each_rule_states_its_part_of_what_remains(division, expected):
    assert stated(workflow("w", 9, 30), division) == pytest.approx(expected)


def test_an_objective_is_positive_where_the_later_work_exceeds_what_remains():
    assert stated(workflow("w", 9, 300), TrueWork("effective"))[:2] == [1, 1]


def test_shares_are_scaled_by_the_size_of_a_stage_among_all_workflows():
    shares = TrueWork("shares", shares={"query": 0.2, "rerank": 0.3, "answer": 0.5})
    small, large = workflow("a", 10, 30), workflow("b", 30, 30)
    found = {r.id: r.stage for r in divided([*small, *large], DEVICE, shares)}
    assert found["a-rerank"].part == pytest.approx(0.15 / 0.65)
    assert found["b-rerank"].part == pytest.approx(0.45 / 0.95)
    assert found["b-~answer"].part == 1
