"""Policies by their YAML names: one literal table per slot, extended by entry points.

A name that is not in a slot's table is looked up in the entry-point group `tandem.<slot>` of the installed
distributions. A name in both is refused when it is used. The gate and vLLM's EngineCore process both resolve
names here. What a plug-in provides for each slot:

- `ordering`: `(OrderingOptions) -> Ordering`, usually the class. It ranks requests at the gate and, unless an
  `engine_policy` has the same name, also inside the engine (`StaticPriorityPolicy`).
- `engine_policy`: `(EngineOptions) -> EnginePolicy`. It plans every engine step.
- `admission`: a `Fits` function `(Share, LookAhead, Footprint) -> bool`: whether the request may start now.
- `victims`: a `VictimRank` function `(Running) -> float`: which request of a priority is preempted first.

An ordering or engine policy reads settings of its own from the `extra` of its options: a plain mapping, as
the configuration file states it. The plug-in checks it and raises ValueError for a value that it cannot use.
`backends.testing.conformance` checks a plug-in of each slot.

Of the built-in policies `fcfs`, `edf` and `least-slack` order the gate and the engine alike. The others order
the engine only: `mc-sf` (shortest predicted output first), `srmt` (shortest remaining memory-time first,
preemptive) and `apt` (Apt-Serve: pending time per block).
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from controlplane.core.clock import Duration, milliseconds
from controlplane.core.plugins import load_plugin, plugin_names, plugin_source
from controlplane.policy.engine.apt_serve import AptServe
from controlplane.policy.engine.engine_precedence import EngineCutoff, EnginePrecedence, by_rank, by_size
from controlplane.policy.engine.interface import EnginePolicy
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.srmt import ShortestRemainingMemoryTime
from controlplane.policy.engine.static_priority import StaticPriorityPolicy
from controlplane.policy.gate.admission import (
    Admission,
    AdmissionOptions,
    Fits,
    fits_ahead,
    fits_always,
    fits_now,
)
from controlplane.policy.gate.ordering import (
    EarliestDeadline,
    Fcfs,
    LeastSlack,
    Ordering,
    OrderingOptions,
    ShortestOutput,
)
from controlplane.policy.gate.preemption import VictimRank, latest_started

# An accepted request waits without a bound; `AdmissionOptions` needs one all the same.
_UNBOUNDED_WAIT = milliseconds(86_400_000)

OrderingFactory = Callable[[OrderingOptions], Ordering]
EnginePolicyFactory = Callable[[EngineOptions], EnginePolicy]
T = TypeVar("T")


def lookup(slot: str, table: Mapping[str, T], name: str, *, setting: str | None = None) -> T:
    """The entry `name` of `table`, or of the entry points of `slot`.

    Args:
        slot: names the entry-point group `tandem.<slot>`.
        table: the built-in entries.
        name: the name to resolve.
        setting: the configuration key for error messages; `slot` if None.

    Raises ValueError if the name is in both, if it is in neither (the message lists all valid names), or if
    the plug-in cannot be loaded.
    """
    plugins = plugin_names(slot)
    stated = f"{setting or slot}={name!r}"
    if name in table:
        if name in plugins:
            raise ValueError(
                f"{stated}: the name of a built-in {slot} and of the plug-in {plugin_source(slot, name)}; "
                "rename the plug-in's entry point or uninstall it"
            )
        return table[name]
    if name in plugins:
        return cast(T, load_plugin(slot, name))
    valid = ", ".join(sorted({*table, *plugins}))
    raise ValueError(f"{stated}: unknown; choose one of {valid}")


def _static_priority(ordering: OrderingFactory, *, look_ahead_for_all: bool = False) -> EnginePolicyFactory:
    def build(options: EngineOptions) -> EnginePolicy:
        limits = AdmissionOptions(0, _UNBOUNDED_WAIT, Duration(0))
        fits = lookup("admission", ADMISSIONS, options.policy, setting="policy")
        victims = lookup("victims", VICTIMS, options.victims)
        return StaticPriorityPolicy(
            ordering(options.ordering_options()),
            Admission(limits, fits, victims),
            Admission(limits, fits_always, victims),
            look_ahead="all" if look_ahead_for_all else options.look_ahead,
        )

    return build


ORDERINGS: Mapping[str, OrderingFactory] = {
    "fcfs": Fcfs,
    "edf": EarliestDeadline,
    "least-slack": LeastSlack,
}

ENGINE_POLICIES: Mapping[str, EnginePolicyFactory] = {
    "fcfs": _static_priority(Fcfs),
    "edf": _static_priority(EarliestDeadline),
    "least-slack": _static_priority(LeastSlack),
    "mc-sf": _static_priority(ShortestOutput, look_ahead_for_all=True),
    "srmt": ShortestRemainingMemoryTime,
    "apt": lambda options: AptServe(options.missed_decay),
}

ADMISSIONS: Mapping[str, Fits] = {
    "look-ahead": fits_ahead,
    "fits-now": fits_now,
}

VICTIMS: Mapping[str, VictimRank] = {
    "latest-started": latest_started,
}


def gate_ordering(name: str, options: OrderingOptions) -> Ordering:
    """The ordering of the gate by its YAML name. Raises ValueError naming the valid entries."""
    setting = "scheduling.ordering"
    usable = {*ORDERINGS, *(plugin_names("ordering") - ENGINE_POLICIES.keys())}
    if name not in usable and name in {*ENGINE_POLICIES, *plugin_names("engine_policy")}:
        raise ValueError(
            f"{setting}={name!r}: it orders an engine's steps, not what waits at the gate; name it in "
            f"scheduling.engine.ordering, or choose one of {', '.join(sorted(usable))}"
        )
    return lookup("ordering", ORDERINGS, name, setting=setting)(options)


def engine_policy(options: EngineOptions) -> EnginePolicy:
    """The policy that an engine's options name.

    Raises ValueError naming the valid entries, or the option that is out of range.
    """
    # Not every engine policy uses these two, but a wrong name is an error with any of them.
    lookup("admission", ADMISSIONS, options.policy, setting="policy")
    lookup("victims", VICTIMS, options.victims)
    table = {
        name: _plugin_ordering(name) for name in plugin_names("ordering") - plugin_names("engine_policy")
    }
    return lookup("engine_policy", {**table, **ENGINE_POLICIES}, options.ordering, setting="ordering")(
        options
    )


def _plugin_ordering(name: str) -> EnginePolicyFactory:
    """A plug-in ordering as an engine policy; loaded when the policy is built."""

    def build(options: EngineOptions) -> EnginePolicy:
        return _static_priority(lookup("ordering", ORDERINGS, name))(options)

    return build


def engine_precedence(options: EngineOptions) -> EnginePrecedence:
    """The order in which an engine with these options starts the requests that wait in it.

    An estimate at the gate: by the gate's rank; where the engine's policy has no rank at the gate, by work
    over the weight of the class.
    """
    if options.ordering in {*ORDERINGS, *plugin_names("ordering")}:
        return EnginePrecedence(by_rank)
    if options.ordering != "srmt":
        return EnginePrecedence(by_size)
    if not options.size_cutoff_share:
        return EnginePrecedence(by_size, preempt_ratio=options.preempt_ratio)
    cutoff = EngineCutoff(
        window=options.size_cutoff_window,
        share=options.size_cutoff_share,
        patience=milliseconds(options.starvation_ms),
        aged_share=options.aged_share,
    )
    return EnginePrecedence(by_size, cutoff, options.preempt_ratio)
