"""Refuses configuration keys of earlier versions, with a message that names the present key or the remedy."""

from collections.abc import Iterator, Mapping

# Earlier and present keys, as dotted paths without list indices.
RENAMED = {
    "admission.keeps_pace": "admission.tpot_guard",
    "admission.lengths": "admission.length_predictor",
    "models.embeddings.yields_cpu": "models.embeddings.idle_cpu_priority",
    "pool.device_memory": "pool.kv_allocator",
    "predictors.remember": "predictors.max_examples",
    "quota.forecast.level": "quota.forecast.quantile",
    "quota.resting_weight": "quota.nominal_weight",
    "scheduling.patience_ms": "scheduling.default_deadline_ms",
    "scheduling.engine.decode_pace": "scheduling.engine.decode_pacing",
    "scheduling.engine.patience_ms": "scheduling.engine.default_deadline_ms",
    "scheduling.engine.prompt_price": "scheduling.engine.prefill_weight",
    "scheduling.engine.size_cut_share": "scheduling.engine.size_cutoff_share",
    "scheduling.engine.size_cut_window": "scheduling.engine.size_cutoff_window",
    "server.max_body": "server.limits.max_body",
}

_MEAN = "the urgency of an owner is the share of its requests that is urgent; remove the key"
_VICTIMS = "the requests that started last are preempted first; remove the key, or choose scheduling.victims"
_MARGIN = "no memory is kept for prediction errors; remove the key"
# Keys without a successor, each with what to do.
REMOVED = {
    "admission.overflow_probability": _MARGIN,
    "scheduling.engine.overflow_probability": _MARGIN,
    "quota.compare": _MEAN,
    "quota.lateness_cap_ms": _MEAN,
    "quota.urgency_aggregation": _MEAN,
    "quota.violation_weight": _MEAN,
    "admission.victim_tau_ms": _VICTIMS,
    "admission.victim_almost_done_steps": _VICTIMS,
    "admission.victim_thrash_penalty": _VICTIMS,
    "scheduling.engine.victim_tau_ms": _VICTIMS,
    "scheduling.engine.victim_almost_done_steps": _VICTIMS,
    "scheduling.engine.victim_thrash_penalty": _VICTIMS,
}


def renamed_keys(content: object) -> Iterator[str]:
    """One line for each key in RENAMED and REMOVED, at any depth: an experiment holds whole sections."""
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
            if remedy := next((remedy for old, remedy in REMOVED.items() if path.endswith(f".{old}")), None):
                yield f"{f'{shown}.{key}'[1:]}: removed; {remedy}"
            left.append((f"{shown}.{key}", path, value))
