"""`tandem check` states the hints that are in force, and why the others are not."""

from pathlib import Path

import pytest

from controlplane.commands.scheduling_hints import scheduling_hints
from controlplane.config import parse
from controlplane.service.preflight import HintFacts, hint_facts

NOTHING = HintFacts(may_leave_idle_class=False, mps_folder=Path("/none"), has_mps=False)
ALL = HintFacts(may_leave_idle_class=True, mps_folder=Path("/mps"), has_mps=True)


def hints(facts: HintFacts, *, chat: bool = True, **worker) -> dict[str, tuple[bool, str]]:
    models = {"embeddings": [{"model": "e", **worker}]} | ({"chat": {"model": "c"}} if chat else {})
    config = parse({"models": models, "pool": {"memory": "2GiB"}})
    return {
        hint.name.partition(" ")[0]: (hint.is_active, hint.reason) for hint in scheduling_hints(config, facts)
    }


@pytest.mark.parametrize(
    ("facts", "worker", "active", "reason"),
    [
        (ALL, {}, True, "every embedding can wait"),
        (ALL, {"idle_cpu_priority": False}, False, "idle_cpu_priority: false"),
        (NOTHING, {}, False, "CAP_SYS_NICE"),
    ],
)
def test_the_idle_class_is_used_if_it_may_be_left(facts, worker, active, reason):
    found = hints(facts, device="cpu", **worker)
    assert found.keys() == {"SCHED_IDLE"}
    assert found["SCHED_IDLE"][0] is active
    assert reason in found["SCHED_IDLE"][1]


@pytest.mark.parametrize(
    ("facts", "worker", "active"),
    [
        (ALL, {}, (True, False)),
        (ALL, {"mps_below_normal": False, "mps_thread_percentage": 40}, (False, True)),
        (NOTHING, {"mps_thread_percentage": 40}, (False, False)),
    ],
)
def test_mps_hints_need_an_mps_server(facts, worker, active):
    found = hints(facts, device="cuda", **worker)
    names = ("CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    assert tuple(found[name][0] for name in names) == active
    assert ("no MPS server at /none" in found[names[0]][1]) is (facts is NOTHING)


def test_without_a_chat_model_there_is_nothing_to_favour():
    assert hints(ALL, chat=False) == {}


def test_the_environment_of_a_worker_states_its_mps_share():
    config = parse({"models": {"embeddings": [{"model": "e", "mps_thread_percentage": 40}]}})
    [model] = config.models.embeddings
    assert model.mps_environment(has_chat=False) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}
    assert model.mps_environment(has_chat=True)["CUDA_MPS_CLIENT_PRIORITY"] == "1"


def test_the_facts_are_those_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not hint_facts().has_mps
    (tmp_path / "control").touch()
    assert hint_facts().has_mps
