"""Compares fleets of mixed and of dedicated boxes by `tandem fleet plan`, at several shares of embeddings.

The models are a chat model of 7 billion parameters and an embedding model of 568 million, by their published
dimensions, on a GPU whose step times follow from its roofline. Nothing of it is measured on a GPU.
"""

import argparse
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.capacity.fleet_plan import plan_fleet
from benchmark_control_plane.fleet_studies.study_file import KindsStudy

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


def kinds_of_boxes(study: KindsStudy) -> dict[str, Any]:
    """GPUs and boxes of each fleet: a row for each share of documents in the arrivals, and fleet."""
    with tempfile.TemporaryDirectory() as folder:
        _write_boxes(Path(folder))
        rows = [
            {
                "indexing": share,
                "fleet": name,
                **_planned(Path(folder), kinds, _streams(share), study),
            }
            for share, (name, kinds) in product(study.indexing, _FLEETS.items())
        ]
    return {"study": "kinds", "rate": study.rate, "seeds": list(study.seeds), "rows": rows}


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
    folder: Path, kinds: Sequence[str], streams: Mapping[str, Any], study: KindsStudy
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
                rate=study.rate,
                utilisation=0.8,
                attainment=0.9,
                device=_DEVICE,
                step=None,
                embedding=None,
                requests=study.requests,
                steps=2,
                seed=study.seeds[0],
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
