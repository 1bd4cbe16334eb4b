"""The MC-SF paper's continuous experiments: Llama-2-70B on A100s, conversation lengths, Poisson arrivals."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.cost_models.step_time import LLAMA2_70B_TP1, tile
from benchmark_control_plane.common.results_file import write_json
from benchmark_control_plane.round_model.schedules import PolicySetting, Schedule, run_policy
from benchmark_control_plane.round_model.workloads import CONVERSATION_MEMORY, RoundRequest

SET_UP = (
    "lognormal lengths with the published mean and median instead of the conversations themselves; "
    "step times fitted to Vidur's profile (3 %) instead of Vidur"
)


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A policy with its options; `published` is the paper's mean latency in seconds, if it gives one."""

    label: str
    policy: str
    alpha: float = 0.0
    beta: float = 0.0
    published: float | None = None


def latency_run(requests: list[RoundRequest], contender: PublishedPolicy, seed: int) -> Schedule:
    """Runs one policy on the requests, in seconds of the 70B model's step time."""
    setting = PolicySetting(
        contender.policy, contender.alpha, contender.beta, seed=seed, step_time=tile(*LLAMA2_70B_TP1)
    )
    return run_policy(requests, CONVERSATION_MEMORY, setting)


def write_results(results: Path, found: Mapping[str, Any]) -> None:
    """Writes `found` to NAME.json in the folder, NAME being its entry "name"."""
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / f"{found['name']}.json", found)
