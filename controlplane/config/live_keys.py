"""States for each configuration key whether a running server takes a new value, and if not, why not.

An entry is a key, or a section whose keys all behave alike; the longest entry decides. A test compares the
entries with the sections, and docs/configuration.md shows them in the column `Live`.
"""

from collections.abc import Mapping
from enum import Enum, auto

_ADDRESS = "the server listens before it takes requests"
_ENGINE = "the engine gets it at its start"
_MEMORY = "the memory is divided at the start"


class Taken(Enum):
    """When a running server takes a new value."""

    LIVE = auto()
    WITH_MOVING_QUOTAS = auto()
    """Live where quotas move; where they are static, the engines were started with them."""
    RESTART = auto()


RESTART: Mapping[str, str] = {
    "models.chat": "the LLM engine is started with it",
    "pool": _MEMORY,
    "predictors": "the predictor is built at the start",
    "decision_log.dir": "the log is opened at the start",
    "decision_log.keep": "the log is opened at the start",
    "server.host": _ADDRESS,
    "server.port": _ADDRESS,
    "server.health_port": _ADDRESS,
    "server.cors": "the routes are built at the start",
    "server.limits.max_grammar": _ENGINE,
    "server.limits.max_schema": _ENGINE,
    "server.limits.max_grammar_properties": _ENGINE,
    "server.limits.max_grammar_choices": _ENGINE,
    "server.limits.max_grammar_repeat": _ENGINE,
    "server.limits.grammar_memory": _ENGINE,
    "server.limits.grammar_ms": _ENGINE,
    "server.limits.grammar_step_ms": _ENGINE,
    "admission.length_predictor": "the predictor is built at the start",
    "quota.policy": "whether quotas move is decided at the start",
    "quota.tick_ms": "the timer is started with it",
    "quota.forecast.window_ms": "the series of past windows has this length",
}
"""Keys that need a restart, each with the reason; switching `scheduling.engine` on or off needs one too."""

URGENCY_KEYS = tuple(
    f"quota.{key}" for key in ("max_step", "dead_band", "nominal_weight", "critical_ms", "critical_weight")
)
"""How quotas follow urgency."""
WITH_MOVING_QUOTAS = ("quota.llm", "quota.embedding", *URGENCY_KEYS, "quota.forecast.quantile")

_ADMISSION = (
    "policy", "max_waiting", "max_wait_ms", "defer_threshold_ms", "tpot_guard", "explore", "engine_queue",
)  # fmt: skip
_SERVER = (
    "open", "overload_status", "drain_ms", "stalled_client_ms", "admin_key_sha256", "metrics_key_sha256",
    "router_key_sha256", "explain_requests", "vllm_metric_names",
)  # fmt: skip
_LIMITS = (
    "max_header_bytes", "max_headers", "header_timeout_ms", "body_timeout_ms", "idle_timeout_ms",
    "max_queue_delay_ms", "max_body", "inline_body", "body_memory", "max_depth", "max_members", "max_values",
    "max_strings", "max_name", "tokenizer_threads", "max_images", "max_image_bytes", "max_image_pixels",
    "max_answer_values", "max_pair_tokens", "grammar_processes",
)  # fmt: skip
WORKERS = ("models.embeddings", "models.rerankers")
LIVE = (
    *WORKERS,
    "classes",
    "tenants",
    "scheduling",
    "log",
    "decision_log.sample",
    "tracing",
    *(f"admission.{key}" for key in _ADMISSION),
    *(f"server.{key}" for key in _SERVER),
    *(f"server.limits.{key}" for key in _LIMITS),
)

_TAKEN: Mapping[str, Taken] = (
    dict.fromkeys(RESTART, Taken.RESTART)
    | dict.fromkeys(WITH_MOVING_QUOTAS, Taken.WITH_MOVING_QUOTAS)
    | dict.fromkeys(LIVE, Taken.LIVE)
)


def entry_of(path: str) -> str:
    """The longest entry that `path`, a key or a value below one, belongs to. Raises KeyError."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:length])) in _TAKEN:
            return entry
    raise KeyError(f"{path}: no entry in controlplane/config/live_keys.py; add one")


def taken(path: str) -> Taken:
    """When a running server takes a new value of `path`."""
    return _TAKEN[entry_of(path)]
