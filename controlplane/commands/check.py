"""`tandem check`: everything that is known about a configuration before any model is loaded.

The facts are collected first, so that an error is printed in place of the plan and not below it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from controlplane.commands.output import print_table
from controlplane.commands.scheduling_hints import scheduling_hints
from controlplane.config import Config
from controlplane.config.active_mechanisms import mechanisms, unused_keys
from controlplane.service.memory.memory_plan import MemoryPlan, example_lengths, plan_rows, ranks_text
from controlplane.service.preflight import check_engine_arguments, hint_facts, hybrid_text, plan_of

_OBJECTIVES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "e2e", "gap_ms": "gap"}


def check_facts(config: Config) -> dict[str, Any]:
    """The facts that `tandem check --json` prints. Raises ConfigError if the configuration is invalid."""
    plan = plan_of(config)
    server = config.server
    return {
        "memory_plan": _plan(plan),
        "hybrid_cache": hybrid_text(config, plan),
        "classes": {name: _service_class(config, name) for name in config.classes},
        "health_port": server.health_port,
        "limits": list(server.limits.lines(plan.max_model_tokens)),
        "mechanisms": [asdict(mechanism) for mechanism in mechanisms(config)],
        "scheduling_hints": [asdict(hint) for hint in scheduling_hints(config, hint_facts())],
        "unused_keys": list(unused_keys(config)),
        "engine_arguments": _engine_arguments(config),
    }


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    sizes = {name: value for name, value in asdict(plan).items() if name.endswith("_bytes")}
    if plan.geometry is None:
        return sizes
    return sizes | {
        "kv_blocks": plan.kv_blocks,
        "block_tokens": plan.geometry.block_tokens,
        "kv_bytes_per_token": plan.geometry.bytes_per_token,
        "max_model_tokens": plan.max_model_tokens,
        "ranks": plan.ranks,
        "requests_at_once": {str(tokens): plan.concurrent(tokens) for tokens in example_lengths(plan)},
    }


def _service_class(config: Config, name: str) -> dict[str, Any]:
    section = config.classes[name]
    objectives = {key: value for key in _OBJECTIVES if (value := getattr(section, key)) is not None}
    return {
        "default": section.default,
        "priority": section.priority,
        "sheddable": section.sheddable,
        "objectives_ms": {key.removesuffix("_ms"): value for key, value in objectives.items()},
    }


def _engine_arguments(config: Config) -> str:
    """Whether the names of the engine arguments are valid. Raises ConfigError if one is not."""
    chat = config.models.chat
    if chat is None or chat.backend != "vllm" or not chat.engine:
        return "none"
    if find_spec("vllm") is None:
        return "not validated, because vllm is not installed"
    check_engine_arguments(config)
    return "known to the installed vllm"


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints the facts as tables."""
    plan = facts["memory_plan"]
    print_table("memory plan", ("part", "MiB"), plan_rows(plan))
    if "kv_blocks" in plan:
        if plan["ranks"] > 1:
            print(ranks_text(plan["ranks"]))
        print(
            f"KV blocks: {plan['kv_blocks']:,} of {plan['block_tokens']} tokens, "
            f"{plan['kv_bytes_per_token']:,} bytes a token"
        )
        for tokens, count in plan["requests_at_once"].items():
            print(f"  {count:>7,} requests of {int(tokens):,} tokens (prompt + output) fit at once")
    if facts["hybrid_cache"] is not None:
        print(facts["hybrid_cache"])
    rows = [
        (f"{name} (default)" if c["default"] else name, c["priority"], _shedding(c), _objectives(c))
        for name, c in facts["classes"].items()
    ]
    print_table("classes", ("class", "priority", "when late", "objectives"), rows)
    port = facts["health_port"]
    print(f"/health and /ready: on {'server.port' if port is None else f'port {port} and server.port'}")
    print("limits:", *facts["limits"], sep="\n  ")
    print_table("mechanisms", ("mechanism", "state", "reason"), _states(facts["mechanisms"]))
    if facts["scheduling_hints"]:
        print_table("scheduling hints", ("hint", "state", "reason"), _states(facts["scheduling_hints"]))
    if facts["unused_keys"]:
        print("keys without effect:", *facts["unused_keys"], sep="\n  ")
    if facts["engine_arguments"] != "none":
        print(f"models.chat.engine: {facts['engine_arguments']}")


def _states(mechanisms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    return [(m["name"], "on" if m["is_active"] else "off", m["reason"]) for m in mechanisms]


def _shedding(section: Mapping[str, Any]) -> str:
    return "sheddable" if section["sheddable"] else "waits up to admission.max_wait_ms"


def _objectives(section: Mapping[str, Any]) -> str:
    stated = section["objectives_ms"]
    return ", ".join(f"{_OBJECTIVES[k + '_ms']} {v:g} ms" for k, v in stated.items()) or "no objective"
