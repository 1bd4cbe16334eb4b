"""The command `tandem capacity`: reads a configuration and a workload, and prints bound and simulation."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmark_control_plane.capacity.device_model import DeviceModel, device_model
from benchmark_control_plane.capacity.search import ClassCapacity, RateSearch, Simulated, undersized
from benchmark_control_plane.capacity.stability import Stability, stability
from benchmark_control_plane.capacity.workload_source import workload_of
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.records import SloTargets
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.output import print_table
from controlplane.config import Config, parse
from controlplane.config.loader import read_yaml
from controlplane.config.packaged import config_path
from controlplane.service.preflight import device_facts

# Requests from which the means of the stability condition are taken.
SAMPLE = 4_000
# The last three would write to the folders and collectors of the running server.
_NOT_SIMULATED = ("models", "server", "tenants", "decision_log", "tracing", "log")


def capacity(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises BadInput or ConfigError."""
    check_options(options)
    path = config_path(options.config)
    content = read_yaml(path)
    config = parse(content, source=str(path))
    workload = workload_of(options, [config])
    model = device_model(
        config,
        device_facts(options.device),
        step=options.step or workload.step,
        embedding=options.embedding or workload.embedding,
        source="--step and --embedding" if options.step or not workload.step else "the log",
    )
    sample = workload.plan(1.0, 0.0, float(workload.most or SAMPLE))
    check_lengths(model, sample)
    bound = stability(sample, model.section, block=model.block_tokens, target=options.attainment)
    assert isinstance(content, dict)
    search = RateSearch(
        Simulated(
            workload.plan, model.section, simulated_sections(content), objectives_of(config),
            requests=options.requests,
        ),
        options.attainment,
        lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    found = search.run(bound, steps=options.steps)
    assumptions = [*model.assumptions, *workload.assumptions, *_assumptions(options)]
    if options.json:
        print(json.dumps(_facts(options, bound, search, found, assumptions), indent=1))
    else:
        _print(options, bound, found, assumptions)
    return ExitStatus.NOT_ATTAINED if undersized(found) else ExitStatus.DONE


def simulated_sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that the simulation takes: policies and classes, but no models and no files."""
    sections = {name: part for name, part in content.items() if name not in _NOT_SIMULATED}
    models = content["models"]
    if not (models.get("chat") and (models.get("embeddings") or models.get("rerankers"))):
        # The simulation has both kinds, of which one gets no request.
        sections.pop("quota", None)
    kept = {k: v for k, v in (sections.pop("predictors", None) or {}).items() if k not in ("file", "encoder")}
    return {**sections, **({"predictors": kept} if kept else {})}


def check_options(options: argparse.Namespace) -> None:
    """Raises BadInput if an option that concerns the simulation is out of range."""
    if not 0 < options.attainment < 1:
        raise BadInput(f"--attainment={options.attainment}: should be above 0 and below 1, for example 0.9")
    if not 50 <= options.requests <= 100_000:
        raise BadInput(f"--requests={options.requests}: should be from 50 to 100,000")
    if not 0 <= options.steps <= 20:
        raise BadInput(f"--steps={options.steps}: should be from 0 to 20")


def check_lengths(model: DeviceModel, requests: Sequence[PlannedRequest]) -> None:
    """Raises BadInput if the longest generation does not fit into the model's context."""
    inputs = max((max(r.lengths) for r in requests if r.lengths), default=0)
    if inputs > model.section.embed_input_tokens:
        raise BadInput(
            f"--workload: an input has {inputs:,} tokens and the embedding model takes "
            f"{model.section.embed_input_tokens:,}; cap the lengths or raise max_input_tokens of the model"
        )
    sizes = (r.prompt_tokens + max(r.output_tokens, r.max_tokens or 0) for r in requests if not r.lengths)
    if (longest := max(sizes, default=0)) > model.section.max_model_tokens:
        raise BadInput(
            f"--workload: a request has {longest:,} tokens and max_model_len is "
            f"{model.section.max_model_tokens:,}; cap the lengths or raise models.chat.engine.max_model_len"
        )


def objectives_of(config: Config) -> dict[str, SloTargets]:
    """The objectives of each class."""
    return {
        name: SloTargets(section.ttft_ms, section.tpot_ms, section.e2e_ms, section.gap_ms)
        for name, section in config.classes.items()
    }


def _assumptions(options: argparse.Namespace) -> list[str]:
    return [
        "LLM steps and embedding passes take turns on the device; output lengths are not known in advance.",
        "The bound counts neither shared prefixes, also of the choices (`n`) of a request, nor memory that "
        "moves between the quotas.",
        f"Each simulated rate has {options.requests:,} requests after a warm-up of a quarter as many, seed "
        f"{options.seed}; host and network take no time.",
    ]


def _facts(
    options: argparse.Namespace,
    bound: Stability,
    search: RateSearch,
    found: Sequence[ClassCapacity],
    assumptions: Sequence[str],
) -> dict[str, Any]:
    return {
        "attainment": options.attainment,
        "stability": asdict(bound),
        "simulated": [asdict(capacity) for capacity in found],
        "attained": [
            {"rate": rate, "lowest": search.lowest(rate), "classes": shares}
            for rate, shares in sorted(search.attained.items())
        ],
        "assumptions": list(assumptions),
    }


def _print(
    options: argparse.Namespace,
    bound: Stability,
    found: Sequence[ClassCapacity],
    assumptions: Sequence[str],
) -> None:
    print(f"Stability: queues grow without bound above {bound.overloaded_above:.3g} requests/s and stay")
    print(f"  bounded below {bound.stable_below:.3g}. {_binding(bound)}")
    print(
        f"  Without the largest requests of each class, {options.attainment:.0%} of them can be served up to "
        f"{bound.attainable_below:.3g}."
    )
    print(
        f"  A full step takes {1e3 * bound.step_seconds:.3g} ms; embeddings take "
        f"{bound.embedding_share:.0%} of the device's time."
    )
    rows = [
        (
            "all together" if c.name is None else c.name,
            "-" if c.rate is None else f"{c.rate:.3g}",
            "-" if c.rate is None else f"{c.rate * c.share:.3g}",
            f"{100 * c.error:.1f}",
            c.limit,
        )
        for c in found
    ]
    title = f"highest rate at {options.attainment:.0%} attainment, simulated"
    print_table(title, ("class", "mix, requests/s", "of it this class", "error, points", "limit"), rows)
    print("assumptions:", *assumptions, sep="\n  ")


def _binding(bound: Stability) -> str:
    if bound.binding == "time":
        return "The device's time binds: more memory would not help."
    return f"What binds is {bound.binding}: twice as much would give {bound.doubled:.3g}."
