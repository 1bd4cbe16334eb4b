"""Starts the servers of a system, or connects to running ones.

Tandem is started with the system's sections merged over the models and classes of the experiment. A split is
vLLM's server and the plain embedding server, each pinned to its cores.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.http_client import Address
from benchmark_control_plane.common.results_file import file_name
from benchmark_control_plane.common.servers import (
    Server,
    all_serving,
    free_port,
    serving,
    tandem_server,
    vllm_server,
)
from benchmark_control_plane.judge.experiment_file import ExperimentPlan, classes_section, merge
from benchmark_control_plane.judge.http_target import Dialect, HttpTarget, http_target
from benchmark_control_plane.judge.system_schema import Endpoint, Live, Pinned, Split, SystemSection

Objectives = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A running system; `metrics` is the address of its /metrics, if it has one."""

    chat: Endpoint | None
    embeddings: Endpoint | None
    dialect: Dialect
    metrics: Address | None
    kv_bytes: int | None = None

    def target(self) -> AbstractAsyncContextManager[HttpTarget]:
        """Target on the system."""
        return http_target(self.chat, self.embeddings, self.dialect)


@contextmanager
def running_system(
    plan: ExperimentPlan, system: SystemSection, objectives: Objectives, folder: Path
) -> Iterator[RunningSystem]:
    """Runs a system until the block ends; logs and configurations are written to `folder`.

    Raises RuntimeError with the end of the log if a server does not start.
    """
    if system.endpoints is not None:
        given = system.endpoints
        metrics = Address.of(given.chat.url) if given.metrics and given.chat else None
        dialect = Dialect(
            names_classes=given.classes, priorities=vllm_priorities(plan) if given.priorities else None
        )
        yield RunningSystem(given.chat, given.embeddings, dialect, metrics)
        return
    assert plan.live is not None
    with ExitStack() as stack:
        if system.tandem is not None:
            yield _tandem(stack, plan, plan.live, system, objectives, folder)
        else:
            assert system.split is not None
            yield _split(stack, plan, plan.live, system.split, folder / file_name(system.name))


def _tandem(
    stack: ExitStack,
    plan: ExperimentPlan,
    live: Live,
    system: SystemSection,
    objectives: Objectives,
    folder: Path,
) -> RunningSystem:
    keys = {stream.tenant: f"key-{stream.tenant}" for stream in plan.streams.values()}
    keys = keys if set(keys) != {"default"} else {}
    file = folder / f"{file_name(system.name)}.yaml"
    described = tandem_server(tandem_config(plan, live, system, objectives, keys), file, name=system.name)
    server = stack.enter_context(serving(described, file.with_suffix(".log")))
    return RunningSystem(
        Endpoint(server.url, live.chat.served_name),
        Endpoint(server.url, live.embedding.served_name),
        Dialect(names_classes=True, tenant_keys=keys),
        Address.of(server.url),
    )


def tandem_config(
    plan: ExperimentPlan, live: Live, system: SystemSection, objectives: Objectives, keys: Mapping[str, str]
) -> dict[str, Any]:
    """Configuration of Tandem's server; `keys` are API keys by tenant."""
    base: dict[str, Any] = {
        "models": {"chat": as_yaml(live.chat), "embeddings": [as_yaml(live.embedding)]},
        "pool": {"memory": live.pool_memory},
        "classes": classes_section(plan, objectives),
    }
    if keys:
        base["tenants"] = {
            tenant: {"api_keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
            for tenant, key in keys.items()
        }
    return merge(base, system.tandem or {})


def _split(stack: ExitStack, plan: ExperimentPlan, live: Live, split: Split, log: Path) -> RunningSystem:
    arguments = vllm_arguments(live, split)
    model = live.chat
    vllm = vllm_server(model.model, model.served_name, arguments, prefix=_pinned(split.llm))
    vllm = replace(vllm, threads=split.llm.threads, nice=split.llm.nice)
    logged = [
        (vllm, log.with_suffix(".vllm.log")),
        (embedding_server(live, split), log.with_suffix(".embedder.log")),
    ]
    chat, embed = stack.enter_context(all_serving(logged))
    limits = split.max_concurrent
    return RunningSystem(
        Endpoint(chat.url, model.served_name, max_concurrent=limits.llm),
        Endpoint(embed.url, live.embedding.served_name, max_concurrent=limits.embedder),
        Dialect(priorities=vllm_priorities(plan) if split.priorities else None),
        Address.of(chat.url),
        arguments["kv_cache_memory_bytes"],
    )


def vllm_priorities(plan: ExperimentPlan) -> dict[str, int]:
    """vLLM's priority of each class; lower is served first."""
    highest = max(section.priority for section in plan.classes.values())
    return {name: highest - section.priority for name, section in plan.classes.items()}


def vllm_arguments(live: Live, split: Split) -> dict[str, Any]:
    """Engine arguments of a split's vLLM server, named as in Python."""
    engine = live.chat.engine
    kv_bytes = split.kv_cache or engine.get("kv_cache_memory_bytes")
    arguments = {**engine, "kv_cache_memory_bytes": kv_bytes, **split.flags}
    if split.priorities:
        arguments["scheduling_policy"] = "priority"
    return arguments


def embedding_server(live: Live, split: Split) -> Server:
    """Embedding server of a split, with the settings of Tandem's worker except for what the split states."""
    section = live.embedding
    settings = as_yaml(section) | {
        "batch_tokens": split.embed_batch_tokens or section.batch_tokens,
        "threads": split.embedder.threads,
        "idle_cpu_priority": split.embedder.idle,
    }
    port = free_port()
    command = [
        *_pinned(split.embedder), sys.executable,
        "-m", "benchmark_control_plane.judge.embedding_server", "--port", str(port),
        "--model", settings.pop("model"), "--settings", json.dumps(settings),
    ]  # fmt: skip
    return Server("embedding server", command, port, "/health", nice=split.embedder.nice)


def _pinned(pinned: Pinned) -> list[str]:
    """Command prefix that pins a process to cores and lowers its priority within its session."""
    cores = ["taskset", "--cpu-list", ",".join(map(str, pinned.cores))] if pinned.cores else []
    return [*cores, "nice", f"--adjustment={pinned.nice}"] if pinned.nice else cores


def as_yaml(section: Any) -> dict[str, Any]:
    """A section as a YAML mapping, without empty values."""
    return {key: value for key, value in asdict(section).items() if value not in (None, (), {})}
