"""The keys that a search may change: valid values, only those that act, never an objective."""

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.tuning.search_space import (
    ON_REQUEST,
    TUNABLE,
    acting_changes,
    acts,
    candidate,
    inactive,
    search_space,
    value_of,
    with_value,
)
from controlplane.config import parse
from controlplane.config.live_keys import entry_of
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import VICTIMS
from tests.benchmark_control_plane.tuning.synthetic_blocks import CONTENT


def without_engine(content):
    return {**content, "scheduling": {"engine": "off"}}


@pytest.mark.parametrize("key", TUNABLE)
def test_every_value_is_valid_and_read_back(key):
    entry_of(key)
    for value in TUNABLE[key]:
        assert value_of(parse(with_value(CONTENT, key, value)), key) == value


def test_no_objective_and_no_shedding_is_tunable():
    for key in [*TUNABLE, *ON_REQUEST]:
        last = key.rpartition(".")[2]
        assert last not in ("ttft_ms", "tpot_ms", "e2e_ms", "gap_ms", "sheddable")
    assert not any(key.startswith("classes") for key in search_space(CONTENT, has_quotas=True).values)


def test_no_other_mechanism_of_the_engine_policy_is_left_out():
    left_out = {name for name in EngineOptions.__slots__ if f"scheduling.engine.{name}" not in TUNABLE}
    # Those of `scheduling` and `admission` are tried there; `victims` has one value without plug-ins.
    assert left_out == {"policy", "victims", "priority_head_start_ms", "default_deadline_ms", "extra"}
    assert len(VICTIMS) == 1


def test_default_and_own_value_are_among_the_values():
    content = with_value(CONTENT, "admission.max_waiting", 77)
    space = search_space(content, has_quotas=True)
    assert space.values["admission.max_waiting"][space.own()["admission.max_waiting"]] == 77
    for key, at in space.defaults().items():
        assert space.values[key][at] == value_of(parse({"models": CONTENT["models"]}), key)


def test_own_choice_changes_nothing_and_another_changes_one_key():
    space = search_space(CONTENT, has_quotas=True)
    own = space.own()
    assert candidate(space, lambda key, values: own[key]) == {}
    other = {**own, "scheduling.priority_head_start_ms": 0}
    at = space.values["scheduling.priority_head_start_ms"].index(4_000)
    other["scheduling.priority_head_start_ms"] = at
    assert candidate(space, lambda key, values: other[key]) == {"scheduling.priority_head_start_ms": 4_000}


def test_what_a_key_inherits_from_an_earlier_change_is_restored():
    space = search_space(CONTENT, has_quotas=True)
    own = space.own()
    chosen = {**own, "scheduling.ordering": space.values["scheduling.ordering"].index("fcfs")}
    changes = candidate(space, lambda key, values: chosen[key])
    assert changes == {"scheduling.ordering": "fcfs", "scheduling.engine.ordering": "srmt"}
    assert parse(space.changed(changes)).engine_options().ordering == "srmt"


@pytest.mark.parametrize(
    ("content", "idle", "active"),
    [
        (CONTENT, "scheduling.engine.look_ahead", "scheduling.engine.preempt_ratio"),
        (
            with_value(CONTENT, "scheduling.engine.ordering", "edf"),
            "scheduling.engine.preempt_ratio",
            "scheduling.engine.look_ahead",
        ),
        (without_engine(CONTENT), "scheduling.engine.decode_pacing", "scheduling.ordering"),
        (with_value(CONTENT, "quota.policy", "static"), "quota.critical_ms", "quota.llm.nominal"),
    ],
)
def test_only_keys_that_act_are_tried(content, idle, active):
    patterns = inactive(parse(content))
    assert not acts(idle, patterns)
    assert acts(active, patterns)


def test_a_change_that_only_another_one_made_act_goes_with_it():
    space = search_space(CONTENT, has_quotas=True)
    both = {
        "scheduling.engine.ordering": "edf",
        "scheduling.engine.look_ahead": "all",
        "admission.max_waiting": 9,
    }
    assert acting_changes(space, both) == both
    # As an ablation that takes the ordering back leaves them, if its time ends then.
    rest = {key: value for key, value in both.items() if key != "scheduling.engine.ordering"}
    assert acting_changes(space, rest) == {"admission.max_waiting": 9}


def test_quotas_that_the_log_does_not_have_are_not_tried():
    space = search_space(CONTENT, has_quotas=False)
    assert not any(key.startswith("quota.") for key in space.values)


def test_a_share_of_the_memory_is_taken_from_the_other():
    quota = parse(with_value(CONTENT, "quota.llm.nominal", 0.6)).quota
    assert (quota.llm.nominal, quota.embedding.nominal) == (0.6, 0.4)


def test_keys_of_classes_are_tried_only_if_named():
    space = search_space(
        CONTENT, also=["classes.batch.priority"], keep=["admission.max_waiting"], has_quotas=True
    )
    assert "classes.batch.priority" in space.values
    assert "admission.max_waiting" not in space.values


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"also": ["classes.batch.ttft_ms"]},
            "--also classes.batch.ttft_ms: should be classes.NAME.priority",
        ),
        ({"also": ["classes.none.weight"]}, "interactive, batch"),
        ({"keep": ["server.port"]}, "--keep server.port: not a key that is tuned"),
    ],
)
def test_other_keys_are_refused(options, says):
    with pytest.raises(BadInput, match=says):
        search_space(CONTENT, has_quotas=True, **options)


def test_a_class_whose_name_has_a_dot_is_refused():
    content = {**CONTENT, "classes": {**CONTENT["classes"], "v1.5": {}}}
    with pytest.raises(BadInput, match="out of interactive, batch; a name with a dot cannot be given"):
        search_space(content, also=["classes.v1.5.weight"], has_quotas=True)
