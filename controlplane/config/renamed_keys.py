"""Refuses configuration keys of earlier versions, with a message that names the present key."""

from collections.abc import Iterator, Mapping

# Earlier and present keys, as dotted paths without list indices.
RENAMED = {
    "admission.keeps_pace": "admission.tpot_guard",
    "admission.lengths": "admission.length_predictor",
    "models.embeddings.yields_cpu": "models.embeddings.idle_cpu_priority",
    "pool.device_memory": "pool.kv_allocator",
    "predictors.remember": "predictors.max_examples",
    "quota.compare": "quota.urgency_aggregation",
    "quota.forecast.level": "quota.forecast.quantile",
    "quota.resting_weight": "quota.nominal_weight",
    "scheduling.patience_ms": "scheduling.default_deadline_ms",
    "scheduling.engine.decode_pace": "scheduling.engine.decode_pacing",
    "scheduling.engine.patience_ms": "scheduling.engine.default_deadline_ms",
    "scheduling.engine.prompt_price": "scheduling.engine.prefill_weight",
    "scheduling.engine.size_cut_share": "scheduling.engine.size_cutoff_share",
    "scheduling.engine.size_cut_window": "scheduling.engine.size_cutoff_window",
}


def renamed_keys(content: object) -> Iterator[str]:
    """One line for each key in RENAMED, at any depth: an experiment holds whole sections."""
    # Not by recursion: a file may nest deeply, and an alias may contain itself.
    left: list[tuple[str, str, object]] = [("", "", content)]
    seen: set[int] = set()
    while left:
        shown, keys, here = left.pop()
        if not isinstance(here, Mapping | list | tuple) or id(here) in seen:
            continue
        seen.add(id(here))
        if not isinstance(here, Mapping):
            left += [(f"{shown}.{index}", keys, item) for index, item in enumerate(here)]
            continue
        for key, value in here.items():
            path = f"{keys}.{key}"
            if new := next((new for old, new in RENAMED.items() if path.endswith(f".{old}")), None):
                yield f"{f'{shown}.{key}'[1:]}: renamed to {new.rpartition('.')[2]}; use {new}"
            left.append((f"{shown}.{key}", path, value))
