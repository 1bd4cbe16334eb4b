"""Builds a chat and an embedding model of real sizes with random weights, and configurations for them.

Nothing is downloaded. The chat model has the layers of Llama-3.1-8B and the vocabulary of
`tandem/tiny-llama`. Its weight file is a sparse file of the right size, which the memory plan counts; vLLM
draws the weights itself (`load_format: dummy`). The embedding model has the layers of BERT-large. Outputs
mean nothing; sizes and times are those of such models.

    python -m benchmark_control_plane.experiments.gpu_evidence.random_models FOLDER [--tiny]
"""

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from backends.bundled_models import resolve

_ROOT = Path(__file__).parents[3]
_BASE_EXPERIMENT = _ROOT / "configs" / "bench" / "one-gpu.yaml"
_CHAT = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
# If the intermediate size is a multiple of 32, vLLM 0.32 ends with an illegal instruction on CPUs with AMX.
_TINY_CHAT = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
_EMBEDDING = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
_TINY_EMBEDDING = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
_ENGINE = {
    "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 256,
    "max_num_batched_tokens": 8192, "block_size": 16, "enable_prefix_caching": True,
}  # fmt: skip
_TINY_ENGINE = {
    "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 32, "block_size": 32,
    "enforce_eager": True, "enable_prefix_caching": True,
}  # fmt: skip
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
CLASSES = {
    "interactive": {"priority": 10, "ttft_ms": 1_000, "tpot_ms": 100, "default": True},
    "indexing": {"priority": 0, "sheddable": False},
}


def build_chat(folder: Path, numbers: Mapping[str, Any]) -> Path:
    """Writes config.json, the tokenizer and a sparse weight file of the right size; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Path(resolve("tandem/tiny-llama"))
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(numbers)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    header = json.dumps({"weights": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return folder


def build_embedding(folder: Path, numbers: Mapping[str, Any], dtype: str) -> Path:
    """Writes a random BERT encoder with the tokenizer of the bundled reranker; returns `folder`."""
    import torch
    from transformers import AutoModel, BertConfig

    source = Path(resolve("tandem/tiny-cross-encoder"))
    stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokens = {name: stated[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    model = AutoModel.from_config(BertConfig(**tokens, **numbers))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in _TOKENIZER[:2]:
        shutil.copy(source / name, folder / name)
    return folder


def live_section(folder: Path, *, is_tiny: bool) -> dict[str, Any]:
    """The models, built in `folder`, as the section `live` of an experiment."""
    dtype = "float32" if is_tiny else "float16"
    chat = build_chat(folder / "chat", _TINY_CHAT if is_tiny else _CHAT)
    embedding = build_embedding(folder / "embedding", _TINY_EMBEDDING if is_tiny else _EMBEDDING, dtype)
    engine = _TINY_ENGINE if is_tiny else _ENGINE
    return {
        "pool_memory": "2GiB" if is_tiny else "34GiB",
        "chat": {
            "model": str(chat),
            "name": "chat",
            "engine": {**engine, "kv_cache_memory_bytes": 2**25 if is_tiny else 2**32},
        },
        "embedding": {
            "model": str(embedding),
            "name": "embed",
            "device": "cpu" if is_tiny else "cuda",
            "dtype": dtype,
            "batch_tokens": 2048 if is_tiny else 16384,
            "max_input_tokens": numbers_of_positions(is_tiny=is_tiny),
            "threads": 1,
        },
    }


def numbers_of_positions(*, is_tiny: bool) -> int:
    """Longest input of the embedding model in tokens."""
    return int((_TINY_EMBEDDING if is_tiny else _EMBEDDING)["max_position_embeddings"])


def write_configurations(folder: Path, *, is_tiny: bool) -> None:
    """Writes experiment.yaml, serve.yaml and kvcached.yaml, and the models that they name, into `folder`."""
    live = live_section(folder / "models", is_tiny=is_tiny)
    chat = live["chat"]
    # Without a given size, the KV cache is sized by pool and quota, as on an operator's server.
    sized = {key: value for key, value in chat["engine"].items() if key != "kv_cache_memory_bytes"}
    serve: dict[str, Any] = {
        "models": {"chat": {**chat, "engine": sized}, "embeddings": [live["embedding"]]},
        "pool": {"memory": "1GiB"} if is_tiny else {"reserve": "3GiB"},
        "quota": {"llm": {"nominal": 0.8}, "embedding": {"nominal": 0.2}},
        "classes": CLASSES,
        "server": {"vllm_metric_names": True},
    }
    experiment = {"extends": str(_BASE_EXPERIMENT), "name": "gpu-evidence", "live": live}
    moving = {**serve, "pool": {**serve["pool"], "kv_allocator": "kvcached"}}
    for name, content in (("serve", serve), ("kvcached", moving), ("experiment", experiment)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a few layers, to rehearse on a CPU")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_configurations(options.folder.resolve(), is_tiny=options.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
