"""Compares fleets of mixed and of dedicated boxes by `tandem fleet plan`, at several shares of embeddings.

The models are a chat model of 7 billion parameters and an embedding model of 568 million, by their published
dimensions, on a GPU whose step times follow from its roofline. Nothing of it is measured on a GPU.

    python -m benchmark_control_plane.fleet_studies.kinds_of_boxes [--rate R] [--indexing SHARE ...]
"""

import argparse
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.capacity.fleet_plan import plan_fleet
from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results, write_json

_CHAT = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
    "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32_768, "vocab_size": 152_064, "tie_word_embeddings": False,
}  # fmt: skip
_ENCODER = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 8_194, "vocab_size": 250_002, "torch_dtype": "float16",
}  # fmt: skip
_CLASSES = {
    "interactive": {"ttft_ms": 500, "tpot_ms": 50, "default": True},
    "retrieval": {"e2e_ms": 200},
    "batch": {"e2e_ms": 20_000},
}
_FLEETS = {"mixed": ("both",), "dedicated": ("chat", "search"), "all kinds": ("both", "chat", "search")}
_DEVICE, _MEMORY = "h100-80", "76GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second of each demand")
    parser.add_argument(
        "--indexing", type=float, nargs="+", default=[0.1, 0.5], help="share of documents in the arrivals"
    )
    parser.add_argument("--requests", type=int, default=400, help="requests of each simulated rate")
    parser.add_argument("--seed", type=int, default=0)
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if not all(0 < share < 1 for share in options.indexing) or not options.rate > 0:
            raise BadInput("--indexing and --rate: shares are between 0 and 1, and the rate is above 0")
        with tempfile.TemporaryDirectory() as folder:
            _write_boxes(Path(folder))
            found: dict[str, object] = {
                f"indexing {share:g}": {
                    name: _planned(Path(folder), kinds, _streams(share), options)
                    for name, kinds in _FLEETS.items()
                }
                for share in options.indexing
            }
        if options.results is not None:
            write_json(options.results, found)
        return found

    return print_json(command)


def _write_boxes(folder: Path) -> None:
    models: dict[str, Any] = {}
    for key, config, more in (
        ("chat", _CHAT, {"engine": {"max_model_len": 8_192}}),
        ("embeddings", _ENCODER, {"dtype": "float16", "max_input_tokens": 8_192}),
    ):
        (folder / key).mkdir()
        (folder / key / "config.json").write_text(json.dumps(config), encoding="utf-8")
        models[key] = {"model": str(folder / key), **more}
    chat, embeddings = {"chat": models["chat"]}, {"embeddings": [models["embeddings"]]}
    for name, served in (("both", chat | embeddings), ("chat", chat), ("search", embeddings)):
        box = {"models": served, "pool": {"memory": _MEMORY}, "classes": _CLASSES}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(box), encoding="utf-8")


def _streams(indexing: float) -> Mapping[str, Any]:
    """Answers over retrieved passages, and documents of 16 passages."""
    return {
        "chat": {
            "kind": "retrieval", "service_class": "interactive", "embed_class": "retrieval",
            "share": 1 - indexing, "query_tokens": {"lognormal": [30, 20, 200]},
            "prompt_tokens": {"lognormal": [900, 700, 3000]}, "output_tokens": {"lognormal": [180, 120, 800]},
        },
        "indexing": {
            "kind": "embed", "service_class": "batch", "share": indexing, "prompt_tokens": {"fixed": 400},
            "batch": {"fixed": 16}, "arrivals": {"cv": 2},
        },
    }  # fmt: skip


def _planned(
    folder: Path, kinds: Sequence[str], streams: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, object]:
    """GPUs, and boxes, utilisation and attainment by kind."""
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({"kinds": {kind: {"config": f"{kind}.yaml"} for kind in kinds}}), "utf-8")
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = plan_fleet(
            argparse.Namespace(
                file=file,
                workload=json.dumps(streams),
                rate=options.rate,
                utilisation=0.8,
                attainment=0.9,
                device=_DEVICE,
                step=None,
                embedding=None,
                requests=options.requests,
                steps=2,
                seed=options.seed,
                data=None,
                json=True,
            )
        )
    facts = json.loads(printed.getvalue())
    rows = {
        row["name"]: {key: row[key] for key in ("boxes", "capacity", "utilisation", "attainment", "limit")}
        for row in facts["kinds"]
    }
    return {"gpus": sum(row["gpus"] for row in facts["kinds"]), "status": status, "kinds": rows}


if __name__ == "__main__":
    raise SystemExit(main())
