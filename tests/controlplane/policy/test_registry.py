"""Names of policies resolve to the literal tables, or to entry points of other distributions."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from controlplane.core import plugins
from controlplane.core.clock import seconds
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.engine.apt_serve import AptServe
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.static_priority import StaticPriorityPolicy
from controlplane.policy.gate.admission import fits_now
from controlplane.policy.gate.ordering import Fcfs, OrderingOptions
from controlplane.policy.gate.preemption import latest_started
from controlplane.policy.registry import (
    ADMISSIONS,
    VICTIMS,
    engine_policy,
    engine_precedence,
    gate_ordering,
    lookup,
)

OPTIONS = OrderingOptions(seconds(1), seconds(10), {"weight": 3})


def longest_pending(options: EngineOptions) -> AptServe:
    return AptServe(options.extra["decay"])


@pytest.fixture
def provided(monkeypatch):
    """Installs entry points, each `(slot, name, value)`."""

    def install(*points: tuple[str, str, str]) -> None:
        found: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
        for slot, name, value in points:
            names = found.setdefault(slot, {})
            names[name] = (*names.get(name, ()), EntryPoint(name, value, f"tandem.{slot}"))
        monkeypatch.setattr(plugins, "_entry_points_of", lambda slot: found.get(slot, {}))

    return install


def test_a_plugin_ordering_serves_gate_and_engine(provided):
    provided(("ordering", "third-party", "controlplane.policy.gate.ordering:Fcfs"))
    assert gate_ordering("third-party", OPTIONS) == Fcfs(OPTIONS)
    policy = engine_policy(EngineOptions(ordering="third-party", extra={"weight": 3}))
    assert isinstance(policy, StaticPriorityPolicy)
    assert policy._ordering.options.extra == {"weight": 3}


def test_a_plugin_engine_policy_gets_its_options_and_is_refused_at_the_gate(provided):
    provided(("engine_policy", "longest", f"{__name__}:longest_pending"))
    options = EngineOptions().changed({"ordering": "longest", "extra": {"decay": 0.4}})
    assert engine_policy(options)._decay == 0.4
    with pytest.raises(ValueError, match="'longest': it orders an engine's steps"):
        gate_ordering("longest", OPTIONS)


def test_a_plugin_engine_policy_takes_precedence_over_the_ordering_of_its_name(provided):
    provided(
        ("ordering", "both", "controlplane.policy.gate.ordering:Fcfs"),
        ("engine_policy", "both", f"{__name__}:longest_pending"),
    )
    assert gate_ordering("both", OPTIONS) == Fcfs(OPTIONS)
    assert isinstance(engine_policy(EngineOptions(ordering="both", extra={"decay": 0.1})), AptServe)


def test_plugins_of_the_other_slots(provided):
    provided(
        ("admission", "mine", "controlplane.policy.gate.admission:fits_now"),
        ("victims", "mine", "controlplane.policy.gate.preemption:latest_started"),
    )
    assert lookup("admission", ADMISSIONS, "mine") is fits_now
    assert lookup("victims", VICTIMS, "mine") is latest_started
    assert (
        engine_policy(EngineOptions(ordering="edf", policy="mine", victims="mine")).ahead.victims
        is latest_started
    )


def test_a_name_in_table_and_entry_points_is_refused(provided):
    provided(
        ("ordering", "edf", "other.package:Edf"),
        ("engine_policy", "srmt", "other.package:Srmt"),
    )
    with pytest.raises(ValueError, match=r"scheduling\.ordering='edf'.*other\.package:Edf.*rename"):
        gate_ordering("edf", OPTIONS)
    with pytest.raises(ValueError, match=r"ordering='srmt'.*other\.package:Srmt"):
        engine_policy(EngineOptions(ordering="srmt"))
    assert gate_ordering("fcfs", OPTIONS) == Fcfs(OPTIONS)


def test_unknown_names_list_tables_and_plugins(provided):
    provided(("ordering", "third-party", "controlplane.policy.gate.ordering:Fcfs"))
    with pytest.raises(ValueError, match=r"scheduling\.ordering='lifo'.*edf, fcfs, least-slack, third-party"):
        gate_ordering("lifo", OPTIONS)
    with pytest.raises(ValueError, match=r"ordering='lifo'.*mc-sf, srmt, third-party"):
        engine_policy(EngineOptions(ordering="lifo"))
    with pytest.raises(ValueError, match=r"victims='dearest'.*latest-started"):
        engine_policy(EngineOptions(victims="dearest"))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([("ordering", "x", "no.such.module:Thing")], "'x': no.such.module:Thing.*cannot be imported"),
        ([("ordering", "x", "controlplane.policy.engine.options:_DAY_MS")], "is not callable"),
        ([("ordering", "x", "one:A"), ("ordering", "x", "two:B")], "one:A.*and two:B.*all but one"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(provided, points, message):
    provided(*points)
    with pytest.raises(ValueError, match=message):
        gate_ordering("x", OPTIONS)


def test_extra_must_be_a_mapping():
    with pytest.raises(ValueError, match="extra='all': a mapping is needed"):
        EngineOptions().changed({"extra": "all"})


def waiting_entry(name: str, *, work: float, rank: int, weight: float = 1.0) -> SimpleNamespace:
    request = SimpleNamespace(
        service_class=ServiceClass("any", Slo(), 0, sheddable=True, stated_weight=weight)
    )
    return SimpleNamespace(rank=(rank, rank, name), work=work, request=request)


@pytest.mark.parametrize(("weight", "goes_first"), [(1.0, False), (3.9, False), (4.1, True)])
def test_engine_precedence_by_work_counts_the_weights(weight, goes_first):
    large, small = waiting_entry("a", work=4.0, rank=2, weight=weight), waiting_entry("b", work=1.0, rank=1)
    before = engine_precedence(EngineOptions(ordering="srmt")).before(small, [large])
    assert before == ([large] if goes_first else [])


def test_only_srmt_with_a_cutoff_has_one_at_the_gate():
    assert engine_precedence(EngineOptions(ordering="srmt")).cutoff is not None
    assert engine_precedence(EngineOptions(ordering="srmt", size_cutoff_share=0.0)).cutoff is None
    assert engine_precedence(EngineOptions(ordering="apt")).cutoff is None


def test_engine_precedence_uses_the_gates_rank_where_the_gate_has_one(provided):
    provided(("ordering", "third-party", "controlplane.policy.gate.ordering:Fcfs"))
    early, small = waiting_entry("a", work=9.0, rank=1), waiting_entry("b", work=1.0, rank=2)
    for name, first in (("edf", early), ("third-party", early), ("srmt", small)):
        precedence = engine_precedence(EngineOptions(ordering=name))
        assert precedence.before(small, [early]) == ([early] if first is early else [])
        assert precedence.before(early, [small]) == ([small] if first is small else [])
