"""The command `tandem fleet plan`: boxes of each kind for a demand, and a simulation of one box of each."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark_control_plane.capacity.box_counts import BoxCounts, KindCount, OfferedKind, count_boxes
from benchmark_control_plane.capacity.box_kinds import (
    Demand,
    MeasuredKind,
    demand_of,
    measured_kind,
    serves,
)
from benchmark_control_plane.capacity.command import (
    SAMPLE,
    check_lengths,
    check_options,
    objectives_of,
    simulated_sections,
)
from benchmark_control_plane.capacity.device_model import device_model
from benchmark_control_plane.capacity.search import Simulated
from benchmark_control_plane.capacity.workload_source import OfferedWorkload, workload_of
from benchmark_control_plane.common.command_line import BadInput
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.output import print_table
from controlplane.config.fleet_file import BoxFile, FleetFile, parse_fleet
from controlplane.config.loader import read_yaml
from controlplane.service.preflight import DeviceFacts, device_facts

# Of a kind without autoscale.max_boxes: the most that a fleet file allows.
_MOST_BOXES = 1_000


def plan_fleet(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises BadInput or ConfigError."""
    check_options(options)
    if not 0 < options.utilisation <= 1:
        raise BadInput(
            f"--utilisation={options.utilisation}: should be above 0 and at most 1, for example 0.8"
        )
    file: Path = options.file
    fleet, files = parse_fleet(read_yaml(file), source=str(file), folder=file.parent)
    workload = workload_of(options, [each.config for each in files.values()])
    rate = options.rate or workload.rate
    if rate is None:
        raise BadInput("--rate: missing; streams have no rate, so state the requests per second of all")
    demand = demand_of(
        workload.plan, rate, sample=workload.most or SAMPLE, most=workload.most, seed=options.seed
    )
    device = device_facts(options.device)
    kinds = {
        name: _measured(name, fleet, files[name], demand, workload, device, options) for name in fleet.kinds
    }
    found = count_boxes(demand.rates, [kind.offered for kind in kinds.values()], options.utilisation)
    attained = {
        count.name: kinds[count.name].attainment(demand, count.rates, count.boxes)
        for count in found.counts
        if count.boxes and found.served == 1
    }
    facts = _facts(options, demand, kinds, found, attained)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(options, demand, kinds, found, attained)
    has_missed = any(share < options.attainment for each in attained.values() for share in each.values())
    return ExitStatus.NOT_ATTAINED if found.served < 1 or has_missed else ExitStatus.DONE


def _measured(
    name: str,
    fleet: FleetFile,
    file: BoxFile,
    demand: Demand,
    workload: OfferedWorkload,
    device: DeviceFacts,
    options: argparse.Namespace,
) -> MeasuredKind:
    """One kind of the fleet, measured."""
    stated, config = fleet.kinds[name], file.config
    model = device_model(
        config, device,
        step=options.step or workload.step, embedding=options.embedding or workload.embedding,
    )  # fmt: skip
    parts = [part for part in demand.rates if serves(config, part)]
    if any(part.endswith("/llm") for part in parts):
        check_lengths(model, demand.sample)
    has_gpus = any(kind.gpus for kind in fleet.kinds.values())
    most = _MOST_BOXES if stated.autoscale is None else stated.autoscale.max_boxes
    assert isinstance(file.content, dict)
    return measured_kind(
        OfferedKind(name, float(stated.gpus if has_gpus else 1), dict.fromkeys(parts, 0.0), most),
        stated,
        model,
        demand,
        Simulated(
            demand.plan, model.section, simulated_sections(file.content), objectives_of(config),
            requests=options.requests,
        ),
        target=options.attainment,
        steps=options.steps,
        say=lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True),
    )  # fmt: skip


def _facts(
    options: argparse.Namespace,
    demand: Demand,
    kinds: Mapping[str, MeasuredKind],
    found: BoxCounts,
    attained: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    return {
        "utilisation": options.utilisation,
        "attainment": options.attainment,
        "demand": dict(demand.rates),
        "served": found.served,
        "short": list(found.short),
        "kinds": [
            {
                **asdict(count),
                "gpus": count.boxes * kinds[count.name].gpus,
                "capacity": kinds[count.name].capacity,
                "limit": kinds[count.name].limit,
                "most": kinds[count.name].offered.most,
                "attainment": dict(attained.get(count.name, {})),
            }
            for count in found.counts
        ],
        "assumptions": _assumptions(options),
    }


def _assumptions(options: argparse.Namespace) -> list[str]:
    return [
        "A box that serves several parts of the demand divides its time between them: half the capacity of "
        "one leaves half that of another.",
        "Requests are spread evenly over the boxes of a kind, and bursts have the room above "
        f"{options.utilisation:.0%}.",
        "Kept is what one box keeps of its part of the demand, simulated as by `tandem capacity`; a box "
        "whose capacity is stated is not simulated.",
    ]


def _print(
    options: argparse.Namespace,
    demand: Demand,
    kinds: Mapping[str, MeasuredKind],
    found: BoxCounts,
    attained: Mapping[str, Mapping[str, float]],
) -> None:
    parts = ", ".join(f"{part} {rate:.3g}" for part, rate in demand.rates.items())
    print(f"demand, requests/s: {sum(demand.rates.values()):.3g} ({parts})")
    if found.served < 1:
        most = sum(count.boxes for count in found.counts)
        print(
            f"No numbers of boxes serve it: the {most:,} that the file allows serve {found.served:.0%}. "
            f"What holds it down: {', '.join(found.short)}."
        )
    else:
        boxes = sum(count.boxes for count in found.counts)
        gpus = sum(count.boxes * kinds[count.name].gpus for count in found.counts)
        print(f"{boxes} boxes with {gpus} GPUs serve it:")
    rows = [_row(count, kinds[count.name], attained.get(count.name, {})) for count in found.counts]
    header = ("kind", "boxes", "GPUs", "requests/s", "utilisation", "a box alone", "met", "limit of a box")
    print_table(f"boxes at a utilisation of at most {options.utilisation:.0%}", header, rows)
    for name, shares in attained.items():
        for each, share in shares.items():
            if share < options.attainment:
                print(
                    f"kinds.{name}: class {each} attains {share:.1%} on a box with its part of the demand, "
                    f"below {options.attainment:.0%}; lower --utilisation, or leave the kind out"
                )
    print("assumptions:", *_assumptions(options), sep="\n  ")


def _row(count: KindCount, kind: MeasuredKind, attained: Mapping[str, float]) -> Sequence[str]:
    rates = ", ".join(f"{part} {rate:.3g}" for part, rate in count.rates.items() if rate > 1e-9)
    return (
        count.name,
        f"{count.boxes}",
        f"{count.boxes * kind.gpus}",
        rates or "-",
        f"{count.utilisation:.0%}",
        "-" if kind.capacity is None else f"{kind.capacity:.3g}",
        ", ".join(f"{name} {share:.1%}" for name, share in attained.items()) or "-",
        kind.limit,
    )
