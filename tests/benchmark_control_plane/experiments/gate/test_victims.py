"""The experiment on victims: each arm differs from the others by a rule that is in use."""

from unittest.mock import patch

from benchmark_control_plane.experiments.gate import victims
from benchmark_control_plane.simulator.simulation import config_of
from controlplane.config.active_mechanisms import unused_keys
from controlplane.policy.registry import ENGINE_POLICIES, VICTIMS
from tests.controlplane.policy.engine.test_class_weights import plan, runs


def test_every_arm_chooses_victims_by_a_rule_that_has_an_effect() -> None:
    with patch.dict(VICTIMS), patch.dict(ENGINE_POLICIES):
        victims._register_arms()
        for system in victims.systems():
            unused = unused_keys(config_of(system.simulated or {}, has_pool=False))
            assert not [line for line in unused if line.startswith("scheduling.victims")], system.name


def test_a_rule_in_srmt_preempts_in_its_order() -> None:
    running = [runs("long", done=10, predicted=300), runs("short", done=90, predicted=100)]
    with patch.dict(VICTIMS), patch.dict(ENGINE_POLICIES):
        victims._register_arms()
        found = {arm: plan(arm, [], running, free=-1).preempt for arm in ("own", "most-recompute")}
    assert found == {"own": [running[0]], "most-recompute": [running[1]]}
