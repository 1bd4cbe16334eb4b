"""The keys that `tandem tune` may change, their values, and which of them act in a configuration.

No objective is among them, nor `sheddable`: no SLO is ever relaxed. A key that does nothing in an
arrangement is not tried there (`controlplane.config.active_mechanisms`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.tuning.batch_budgets import BUDGETS, check_budgets
from controlplane.config import Config, parse
from controlplane.config.active_mechanisms import idle_keys
from controlplane.policy.engine.options import EngineOptions

Value = str | float | bool | None
Changes = Mapping[str, Value]
"""New values by key."""

# In the order in which they are applied: what a key inherits is known when its turn comes.
TUNABLE: Mapping[str, tuple[Value, ...]] = {
    "scheduling.ordering": ("edf", "least-slack", "fcfs"),
    "scheduling.engine.ordering": ("srmt", "edf", "least-slack", "fcfs", "mc-sf", "apt"),
    "scheduling.priority_head_start_ms": (0, 250, 500, 1_000, 2_000, 4_000, 8_000),
    "scheduling.default_deadline_ms": (2_500, 5_000, 10_000, 20_000, 40_000),
    "scheduling.engine.decode_pacing": (0, 0.4, 0.6, 0.8, 0.9),
    "scheduling.engine.look_ahead": ("background", "all", "none"),
    "scheduling.engine.preempt_ratio": (1, 1.1, 1.5, 2, 4),
    "scheduling.engine.urgency": (0, 0.25, 0.5, 0.75, 1),
    "scheduling.engine.settle_steps": (0, 12, 36, 60),
    "scheduling.engine.size_cutoff_share": (0, 0.5, 0.75, 1, 1.5),
    # More arrivals than the default are not in a block of the log, so that larger windows would not differ.
    "scheduling.engine.size_cutoff_window": (75, 150, 300, 600),
    "scheduling.engine.starvation_ms": (5_000, 15_000, 30_000, 60_000),
    "scheduling.engine.aged_share": (0, 0.02, 0.05, 0.1, 0.2),
    "scheduling.engine.prefill_weight": (0, 0.5, 1, 2),
    "scheduling.engine.recompute_weight": (0, 1, 3, 6),
    "scheduling.engine.missed_decay": (0, 0.25, 0.5, 1),
    "admission.policy": ("look-ahead", "fits-now"),
    "admission.tpot_guard": (True, False),
    "admission.defer_threshold_ms": (0, 50, 100, 250, 500),
    "admission.max_waiting": (50, 100, 250, 500, 1_000, 2_000),
    "admission.max_wait_ms": (5_000, 15_000, 30_000, 60_000),
    "admission.engine_queue": (16, 64, 256, 1_000),
    "quota.policy": ("auto", "static"),
    "quota.llm.nominal": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "quota.nominal_weight": (0, 0.1, 0.3, 1, 3),
    "quota.critical_ms": (100, 250, 500, 1_000, 2_000),
    "quota.critical_weight": (0.25, 0.5, 1, 2, 4),
    "quota.max_step": (0.01, 0.02, 0.05, 0.1, 0.2),
    "quota.forecast.quantile": (None, 0.5, 0.75, 0.9, 0.95),
}
"""Values of each key, those of numbers ascending. The default of a key is among them."""

ON_REQUEST: Mapping[str, tuple[Value, ...]] = {"priority": (0, 1, 2, 5, 10), "weight": (0.5, 1, 2, 4, 8)}
"""Keys of a class that are tried only if the operator names them, as `classes.NAME.priority`."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The operator's configuration and the values that a search may give its keys.

    Attributes:
        content: the operator's YAML.
        values: values by key, in the order of application; the operator's own and the default included.
    """

    content: Mapping[str, Any]
    values: Mapping[str, Sequence[Value]]

    def changed(self, changes: Changes) -> dict[str, Any]:
        """The operator's YAML with these changes."""
        found = dict(self.content)
        for key, value in changes.items():
            found = with_value(found, key, value)
        return found

    def own(self) -> dict[str, int]:
        """The position of the operator's value of each key."""
        config = parse(self.content)
        return {key: known.index(value_of(config, key)) for key, known in self.values.items()}

    def defaults(self) -> dict[str, int]:
        """The position of Tandem's default of each key."""
        usual = parse({"models": self.content["models"]})
        return {
            key: known.index(value_of(usual, key))
            for key, known in self.values.items()
            if key in TUNABLE and key != "quota.llm.nominal"
        }


def search_space(
    content: Mapping[str, Any],
    *,
    also: Sequence[str] = (),
    keep: Sequence[str] = (),
    has_quotas: bool,
    budgets: Mapping[str, Sequence[Value]] = MappingProxyType({}),
) -> SearchSpace:
    """The space around a configuration.

    Args:
        content: the operator's YAML, valid.
        also: keys of classes that may change too: `classes.NAME.priority` or `classes.NAME.weight`.
        keep: keys that must not change.
        has_quotas: whether the log's machine has quotas that move; otherwise keys of `quota` are not tried.
        budgets: values of batch budgets (`budget_values`) and of static shares, tried in any case.

    Raises BadInput for a key that cannot be tuned.
    """
    config, usual = parse(content), parse({"models": content["models"]})
    table = {**TUNABLE, **{key: _on_request(key, config) for key in also}, **budgets}
    if unknown := sorted(set(keep) - {*table, *BUDGETS}):
        known_keys = ", ".join(dict.fromkeys([*table, *BUDGETS]))
        raise BadInput(f"--keep {unknown[0]}: not a key that is tuned; these are {known_keys}")
    values: dict[str, Sequence[Value]] = {}
    for key, known in table.items():
        if key in keep or (key.startswith("quota.") and not has_quotas and key not in budgets):
            continue
        present = [
            value_of(config, key),
            *([value_of(usual, key)] if key in TUNABLE and key not in budgets else []),
        ]
        values[key] = _ordered(list(dict.fromkeys([*known, *present])))
    return SearchSpace(content, values)


def _on_request(key: str, config: Config) -> tuple[Value, ...]:
    section, _, rest = key.partition(".")
    name, _, field = rest.rpartition(".")
    # Paths join keys by dots.
    known = [each for each in config.classes if "." not in each]
    if section != "classes" or field not in ON_REQUEST or name not in known:
        raise BadInput(
            f"--also {key}: should be classes.NAME.priority or classes.NAME.weight, with NAME out of "
            f"{', '.join(known) or 'none'}; a name with a dot cannot be given"
        )
    return ON_REQUEST[field]


def _ordered(values: Sequence[Value]) -> Sequence[Value]:
    """Numbers in ascending order after None; names as they are."""
    if any(isinstance(value, str | bool) for value in values):
        return values
    return sorted(values, key=lambda value: (value is not None, float(value or 0)))


def value_of(config: Config, key: str) -> Value:
    """The value that a key has or inherits."""
    if key == "scheduling.ordering":
        return config.scheduling.gate_ordering
    if key == "admission.engine_queue" and config.admission.engine_queue is None:
        return 1_000 if config.scheduling.engine is not None else 64
    if key.startswith("scheduling.engine."):
        options = config.engine_options() or EngineOptions()
        found: Value = getattr(options, key.rpartition(".")[2])
        return found
    here: Any = config
    for part in key.split("."):
        if part.isdecimal():
            here = here[int(part)]
        else:
            here = here[part] if isinstance(here, Mapping) else getattr(here, part)
    if key.endswith(".weight") and here is None:
        name = key.split(".")[1]
        return config.service_classes()[name].weight
    assert here is None or isinstance(here, str | float | int)
    return here


def with_value(content: Mapping[str, Any], key: str, value: Value) -> dict[str, Any]:
    """The content with another value of a key.

    `quota.llm.nominal` takes from or gives to `quota.embedding.nominal`, so that their sum stays.
    """
    found: dict[str, Any] = _with(content, key.split("."), value)
    if key == "quota.llm.nominal":
        quota = parse(content).quota
        both = quota.llm.nominal + quota.embedding.nominal
        rest = round(max(0.0, both - float(value or 0)), 6)
        found = _with(found, ["quota", "embedding", "nominal"], rest)
    return found


def _with(content: Any, path: Sequence[str], value: Value) -> Any:
    first, *rest = path
    if isinstance(content, list):
        at = int(first)
        return [*content[:at], _with(content[at], rest, value), *content[at + 1 :]]
    inner = content.get(first) or {}
    return {**content, first: _with(inner, rest, value) if rest else value}


def inactive(config: Config) -> list[list[str]]:
    """The keys and sections, as paths, that do nothing in this configuration."""
    patterns = [*idle_keys(config), *(["scheduling.engine"] if config.scheduling.engine is None else [])]
    return [pattern.split(".") for pattern in patterns]


def acts(key: str, idle: Sequence[Sequence[str]]) -> bool:
    """Whether a key does anything where `idle` does not."""
    parts = key.split(".")
    return not any(_matches(pattern, parts) for pattern in idle)


def acting_changes(space: SearchSpace, changes: Changes) -> dict[str, Value]:
    """The changes that do something beside the others; taking one back may leave others without effect."""
    idle = inactive(parse(space.changed(changes)))
    return {key: value for key, value in changes.items() if acts(key, idle)}


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the pattern names the key or a section that holds it; NAME stands for any name."""
    return len(pattern) <= len(parts) and all(
        one in ("NAME", other) for one, other in zip(pattern, parts, strict=False)
    )


def candidate(space: SearchSpace, choose: Callable[[str, Sequence[Value]], int]) -> dict[str, Value]:
    """The changes of a choice, made key by key: keys whose value differs from the operator's.

    Args:
        space: the search space.
        choose: called with a key that acts under the choices before it, and its values; returns a
            position among them.

    Raises ConfigError for a combination that the server refuses.
    """
    content, changes = dict(space.content), dict[str, Value]()
    config = parse(content)
    idle = inactive(config)
    for key, known in space.values.items():
        if not acts(key, idle):
            continue
        value = known[choose(key, known)]
        if value_of(config, key) != value:
            content = with_value(content, key, value)
            config = parse(content)
            idle = inactive(config)
            changes[key] = value
    check_budgets(config)
    return changes
