"""Compares Tandem with vLLM and an embedding server beside it, all on one device, with the same models.

Starts the servers of both at the same time and runs the experiment `configs/bench/one-gpu.yaml` on them. The
models and the size of the KV cache are those of the section `live` of MODELS.yaml.

    python -m benchmark_control_plane.experiments.gpu_evidence.one_gpu MODELS.yaml --out DIR
        [--seeds 0 1] [--quick]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.common.command_line import data_folder_option, exit_status
from benchmark_control_plane.common.servers import (
    Server,
    all_serving,
    interrupt_on_sigterm,
    tandem_server,
    vllm_server,
)
from benchmark_control_plane.experiments.collocation.server_pairs import models_of
from benchmark_control_plane.judge.experiment_file import ExperimentPlan, read_experiment
from benchmark_control_plane.judge.reference_system import objectives_from
from benchmark_control_plane.judge.run_experiment import run_experiment
from benchmark_control_plane.judge.system_schema import Live, Split, SystemSection
from benchmark_control_plane.judge.systems import embedding_server, tandem_config, vllm_arguments

EXPERIMENT = Path(__file__).resolve().parents[3] / "configs" / "bench" / "one-gpu.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, help="experiment with the models in its section live")
    parser.add_argument("--out", type=Path, required=True, help="results folder")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the experiment")
    parser.add_argument("--quick", action="store_true", help="two loads, one seed, windows of 6 s")
    return exit_status(lambda: _run(parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    interrupt_on_sigterm()
    live = models_of(options.models)
    plan = read_experiment(EXPERIMENT, data_folder_option(None)).plan
    options.out.mkdir(parents=True, exist_ok=True)
    servers = described_servers(plan, live, options.out)
    with all_serving([(server, options.out / f"{server.name}.log") for server in servers]) as running:
        file = options.out / "experiment.yaml"
        content = on_servers(yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8")), running)
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return run_experiment(file, options.out, seeds=options.seeds, is_quick=options.quick)


def described_servers(plan: ExperimentPlan, live: Live, folder: Path) -> list[Server]:
    """Tandem's server, vLLM's and the embedding server; Tandem's configuration is written to `folder`."""
    # Contexts and graphs of three processes on a GPU.
    reserve = {"pool": {"reserve": "3GiB"}} if live.embedding.device == "cuda" else {}
    system = SystemSection("tandem", "tandem", tandem=reserve)
    config = tandem_config(plan, live, system, objectives_from(plan, {}), {})
    # Requests without a priority are served in order of arrival.
    split = Split(priorities=True)
    chat = live.chat
    return [
        tandem_server(config, folder / "tandem.yaml"),
        vllm_server(chat.model, chat.served_name, vllm_arguments(live, split)),
        embedding_server(live, split),
    ]


def on_servers(experiment: Mapping[str, Any], running: Sequence[Server]) -> dict[str, Any]:
    """The experiment with the addresses of running servers, in the order of `described_servers`."""
    tandem, vllm, embedding = (server.url for server in running)
    systems = []
    for system in experiment["systems"]:
        is_tandem = system["kind"] == "tandem"
        addresses = (
            {"chat": tandem, "embeddings": tandem} if is_tandem else {"chat": vllm, "embeddings": embedding}
        )
        endpoints = {
            **system["endpoints"],
            **{kind: {**system["endpoints"][kind], "url": url} for kind, url in addresses.items()},
        }
        systems.append({**system, "endpoints": endpoints})
    return {**experiment, "systems": systems}


if __name__ == "__main__":
    sys.exit(main())
