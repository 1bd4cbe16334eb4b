"""The device of a decision log: how passes and steps share it, the time that they take, and its sizes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backends.cost_models.step_time import BatchTime, StepLoad
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.pooled_steps import pass_factor, pooled_costs, step_spread
from benchmark_control_plane.simulator.simulated_machine import Machine
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.kv_geometry import KvGeometry
from controlplane.service.decision_log.log_rows import SIMULATED_RUN, Row


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds per step, sequence, KV cell and prompt token, and per pass, token and token times length.

    `spread` are factors of the times of steps, each as likely as the others. Passes beside steps take
    `pass_factor` times as long: less than 1 where several lanes compute them, and the steps' doing above.
    """

    step: tuple[float, float, float, float]
    embedding: tuple[float, float, float]
    spread: tuple[float, ...] = (1.0,)
    pass_factor: float = 1.0

    def batch_time(self, *, slower: float = 1.0) -> BatchTime:
        """The time of a step of the simulated device, times `slower`; it can be sent to another process."""
        step = tuple(slower * cost for cost in self.step)
        embedding = tuple(slower * min(1.0, self.pass_factor) * cost for cost in self.embedding)
        return partial(_batch_seconds, step, embedding)

    @property
    def pass_slowdown(self) -> float:
        """How many times as long a pass takes during steps."""
        return max(1.0, self.pass_factor)

    def slower(self, *, steps: float, passes: float) -> "DeviceCosts":
        """The costs with steps and passes that take so many times as long."""
        base, decode, cell, prompt_token = (steps * cost for cost in self.step)
        step = base, decode, cell, prompt_token
        return replace(self, step=step, pass_factor=passes * self.pass_factor)


def _batch_seconds(step: Sequence[float], embedding: Sequence[float], load: StepLoad) -> float:
    took = 0.0
    if load.has_llm:
        base, decode, cell, prompt_token = step
        took = base + decode * load.decodes + cell * load.cells + prompt_token * load.prefill_tokens
    if load.inputs:
        start, token, square = embedding
        took += start + (token + square * load.length) * load.inputs * load.length
    return took


def logged_sharing(config: Row, left_out: list[str]) -> DeviceSharing:
    """How passes share the device with steps by a `config` row; in turns if there are none."""
    stated = [model.get("sharing") for model in config["machine"]["embedders"].values()]
    if None not in stated:
        known = {each.value: each for each in DeviceSharing}
        return known[stated[0]] if stated else DeviceSharing.TURNS
    if config["run"].endswith(SIMULATED_RUN):
        return DeviceSharing.TURNS
    found = _first_version_sharing(config["config"])
    where = "in" if found is DeviceSharing.IDLE else "not in"
    left_out.append(
        "schema version 1 does not say how passes share the device with steps: by the configuration of the "
        f"workers they are replayed at the same time, {where} the idle class of the operating system"
    )
    return found


def _first_version_sharing(config: Mapping[str, Any]) -> DeviceSharing:
    """By the keys that decide it; without a stated device or kvcached, workers count as on a CPU."""
    models = config["models"]
    workers = [*models.get("embeddings", ()), *models.get("rerankers", ())]
    is_gpu = config.get("pool", {}).get("kv_allocator") == "kvcached" or any(
        (worker.get("device") or "").startswith("cuda") for worker in workers
    )
    may_idle = models.get("chat") is not None and all(
        worker.get("idle_cpu_priority") is not False for worker in workers
    )
    return DeviceSharing.IDLE if may_idle and not is_gpu else DeviceSharing.BESIDE


def logged_costs(
    steps: Sequence[Row],
    rows: Sequence[Row],
    machine: Mapping[str, Any],
    sharing: DeviceSharing,
    left_out: list[str],
) -> tuple[DeviceCosts, str | None]:
    """The costs by the models of the first half, and the embedding model that they hold for."""
    middle = (rows[0]["at"] + rows[-1]["at"]) // 2
    counts = Counter(row["model"] for row in rows if row["kind"] == "embed")
    embedder = counts.most_common(1)[0][0] if counts else next(iter(machine["embedders"]), None)
    if len(counts) > 1:
        left_out.append(f"{len(counts)} embedding models are replayed as one, with the times of {embedder}")
    costs = DeviceCosts((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    if any(row["kind"] == "generate" for row in rows):
        half = _first_half([row for row in steps if row["llm"]], middle, "step times", left_out)
        models = [row["llm"] for row in half]
        costs = replace(costs, step=pooled_costs(models))
        if sharing is not DeviceSharing.TURNS:
            costs = replace(costs, spread=step_spread(models))
    if counts:
        known = [row for row in steps if embedder in row["passes"]]
        half = _first_half(known, middle, "times of embedding passes", left_out)
        models = [row["passes"][embedder] for row in half]
        base, token, square = (models[-1][name] for name in ("base_s", "token_s", "square_s"))
        costs = replace(costs, embedding=(base, token, square))
        if sharing is not DeviceSharing.TURNS:
            # In turns, the time of a pass is logged with that of its step.
            costs = replace(costs, pass_factor=pass_factor(models))
    return costs, embedder


def _first_half(steps: Sequence[Row], middle: int, what: str, left_out: list[str]) -> Sequence[Row]:
    """The rows of the first half; of a shorter log, the first there is. Raises BadInput without any."""
    if not steps:
        raise BadInput(f"the log has no model of the {what}; it needs a minute of traffic or a regular stop")
    if earlier := [row for row in steps if row["at"] <= middle]:
        return earlier
    left_out.append(f"the model of the {what} is of the second half, since the first has none")
    return steps[:1]


def logged_machine(
    facts: Mapping[str, Any],
    embedder: str | None,
    costs: DeviceCosts,
    sharing: DeviceSharing,
    steps: Sequence[Row],
) -> Machine:
    """The simulated device of these sizes and costs; `facts` are the `machine` of a `config` row."""
    machine = Machine(
        costs.batch_time(),
        pool_bytes=facts["pool_bytes"],
        sharing=sharing,
        step_spread=costs.spread,
        pass_slowdown=costs.pass_slowdown,
    )
    for llm in facts["generators"].values():
        geometry = KvGeometry(llm["elements_per_token"], llm["bytes_per_element"], llm["block_tokens"])
        largest = max((row["llm"]["largest_tokens"] for row in steps if row["llm"]), default=0)
        machine = replace(
            machine,
            geometry=geometry,
            kv_bytes=llm["kv_bytes"],
            max_model_tokens=llm["max_model_tokens"],
            max_running=llm["max_running"],
            # The engine's own bound is not reported; no step was larger.
            step_tokens=max(largest, llm["block_tokens"]),
            has_prefix_cache=llm["has_prefix_cache"],
        )
    if embedder in facts["embedders"]:
        model = facts["embedders"][embedder]
        # Inputs of all models are replayed as those of one.
        longest = max(each["max_input_tokens"] for each in facts["embedders"].values())
        machine = replace(
            machine,
            embed_batch_tokens=max(longest, model["workspace_bytes"] // model["bytes_per_token"]),
            embed_max_running=model["max_running"],
            embed_bytes_per_token=model["bytes_per_token"],
            embed_input_tokens=longest,
            workspace_batches=max(1.0, facts["workspace_bytes"] / model["workspace_bytes"]),
        )
    return machine
