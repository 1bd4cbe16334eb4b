"""The machine of a log whose memory is divided once, under other shares of it.

Where quotas do not move, `quota.llm.nominal` decides the size of the KV cache and `quota.embedding.nominal`
that of the passes' workspace. Both are parts of a pool that device and models leave, and these stay those of
the log. So each size changes as its share does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import config_of
from controlplane.config import ConfigError

LLM_SHARE, EMBEDDING_SHARE = "quota.llm.nominal", "quota.embedding.nominal"


def decide_sizes(traffic: RecordedTraffic) -> bool:
    """Whether the static shares of the log decided both sizes: of one model each, and no size is stated."""
    facts, config = traffic.config["machine"], traffic.config["config"]
    chat = config["models"].get("chat") or {}
    return (
        traffic.machine.pool_bytes is None
        and len(facts.get("generators", ())) == len(facts.get("embedders", ())) == 1
        and config.get("pool", {}).get("kv_allocator", "static") == "static"
        and chat.get("engine", {}).get("kv_cache_memory_bytes") is None
    )


def with_shares(traffic: RecordedTraffic, machine: Machine, sections: Mapping[str, Any]) -> Machine:
    """The log's `machine` with the memory that the shares of `sections` give each kind of model.

    The same machine if the shares are those of the log, or if they decide no sizes. Raises ConfigError if the
    longest request or one whole pass does not fit.
    """
    if sections.get("quota") == traffic.sections.get("quota") or not decide_sizes(traffic):
        return machine
    was, now = (config_of(each, has_pool=False).quota for each in (traffic.sections, sections))
    if (was.llm.nominal, was.embedding.nominal) == (now.llm.nominal, now.embedding.nominal):
        return machine
    block = machine.geometry.bytes_per_block
    # A cache in which all requests fit has no size; that of a log has one.
    kv_bytes = int((machine.kv_bytes or 0) * now.llm.nominal / was.llm.nominal) // block * block
    workspace = traffic.config["machine"]["workspace_bytes"]
    workspace = round(workspace * now.embedding.nominal / was.embedding.nominal)
    batch = machine.embed_batch_tokens * machine.embed_bytes_per_token
    for name, given, needed in (
        (LLM_SHARE, kv_bytes, machine.geometry.bytes(machine.max_model_tokens)),
        (EMBEDDING_SHARE, workspace, batch),
    ):
        if given < needed:
            raise ConfigError(f"{name}: gives {given:,} bytes and {needed:,} are needed; raise it")
    return replace(machine, kv_bytes=kv_bytes, workspace_batches=workspace / batch)
