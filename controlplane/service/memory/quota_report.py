"""What the operator and Prometheus are shown of the quotas that move."""

from controlplane.core.request import Owner
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.runtime.health_tracker import Fault
from predictors.load.series import LEVELS


def quota_state(quotas: QuotaController) -> dict[str, object]:
    """Quotas, urgency and forecasts for the operator."""
    load = quotas.demand.load
    forecast = load.next_window(quotas.clock.now())
    return {
        "device_memory": quotas.pool.memory.mode,
        "pool_bytes": quotas.pool.memory.pool_bytes,
        "withheld_bytes": quotas.withheld,
        "reserved_bytes": quotas.reserved,
        "engine_quota_bytes": quotas.engine.quota,
        "engine_use_ceiling_bytes": quotas.engine.ceiling,
        "owned_bytes": {owner.value: share for owner, share in quotas.owned.items()},
        "usable_bytes": {owner.value: share for owner, share in quotas.usable.items()},
        "urgency": {owner.value: urgency for owner, urgency in quotas.urgency.items()},
        "moves": quotas.moves,
        "health": quotas.health.to_json(),
        "reclaimed_bytes": quotas.reclaimed_bytes,
        "embedding_load": {
            "tokens_per_second": load.tokens_per_second(),
            "dispersion": load.arrivals.dispersion,
            "period_windows": load.arrivals.period,
            "levels": LEVELS,
            "next_tokens": None if forecast is None else forecast.tokens,
            "coverage": load.tokens.coverage,
        },
    }


def quota_readings(quotas: QuotaController, metrics: Metrics) -> Readings:
    """Quotas, urgency and forecasts for Prometheus."""
    load = quotas.demand.load
    forecast = load.next_window(quotas.clock.now())
    levels = [str(level) for level in LEVELS]
    return {
        metrics.quota_before_lending: {owner.value: share for owner, share in quotas.owned.items()},
        metrics.urgency: {owner.value: urgency for owner, urgency in quotas.urgency.items()},
        metrics.quota_moves: quotas.moves,
        metrics.quota_failures: {fault.value: quotas.health.failures[fault] for fault in Fault},
        metrics.reclaimed_bytes: {Owner.LLM.value: quotas.reclaimed_bytes},
        metrics.forecast_tokens: dict(zip(levels, forecast.tokens, strict=True)) if forecast else {},
        metrics.forecast_coverage: load_coverage(quotas),
    }


def load_coverage(quotas: QuotaController) -> dict[str, float]:
    """Share of the windows whose embedding load was at most each forecast quantile, by its level."""
    levels = [str(level) for level in LEVELS]
    return dict(zip(levels, quotas.demand.load.tokens.coverage, strict=True))
