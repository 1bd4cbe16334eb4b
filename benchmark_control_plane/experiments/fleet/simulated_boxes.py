"""Fleets of real boxes with simulated engines, so that two cores carry several; all but the engine is real.

The engines are plug-ins (`tandem.generator`, `tandem.embedder`), found through metadata in a folder on
PYTHONPATH. The LLM outputs as many tokens as the request allows, in the time of its step-time model. Each
token's text is the monotonic time of the host at which the engine gave it out. The file begun.log has the
client id of each begun request.
"""

import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from backends.cost_models.step_time import affine, embedding_line, llm_only
from backends.simulated.embedder import SimulatedEmbedder
from backends.simulated.generator import SimulatedGenerator
from backends.simulated.shared_device import SimulatedDevice
from benchmark_control_plane.common.servers import Server, free_port, serving
from controlplane.config import Config
from controlplane.config.models_section import ChatModel, EmbeddingModel
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.request import Request
from controlplane.service.memory.memory_plan import MemoryPlan

MODEL, EMBEDDING_MODEL = "simulated", "simulated-embedding"
STEP_SECONDS = (50e-3, 1e-4, 5e-4, 0.0)
"""Seconds of a step, and more for each prompt token, sequence and cached token; chosen, not measured."""
EMBEDDING_SECONDS = (10e-3, 1e-5)
"""Seconds of an embedding pass, and more for each token; chosen, not measured."""
MAX_RUNNING = 8
CLASS, TTFT_SECONDS, TPOT_SECONDS = "interactive", 0.5, 0.1
BEGUN = "begun.log"
_BEGUN = "TANDEM_SIMULATED_BEGUN"
_ROOT = Path(__file__).resolve().parents[3]
_ENTRY_POINT = f"""\
[tandem.generator]
simulated = {__name__}:simulated_engine
[tandem.embedder]
simulated = {__name__}:simulated_embedder
"""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip


class _TimedGenerator(SimulatedGenerator):
    """Writes the time of each token as its text, and each begun request into a file."""

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        _note_begun(request)
        async for delta in super().generate(request, prompt, sampling, chat, handoff=handoff):
            yield replace(delta, text=f"{time.monotonic():.6f} ") if delta.token_ids else delta


def _note_begun(request: Request) -> None:
    with Path(os.environ[_BEGUN]).open("a", encoding="utf-8") as file:
        # A serial number follows the client's id.
        file.write(request.id.rpartition("-")[0] + "\n")


def simulated_engine(config: Config, chat: ChatModel, plan: MemoryPlan) -> SimulatedGenerator:
    """The engine for `models.chat`; tokens are bytes of the prompt."""
    if plan.geometry is None:
        raise ValueError("models.chat: the memory plan has no geometry of a KV cache")
    return _TimedGenerator(
        SimulatedDevice(llm_only(affine(*STEP_SECONDS))),
        geometry=plan.geometry,
        lengths=lambda request: request.max_output_tokens,
        kv_bytes=plan.kv_bytes,
        model=chat.served_name,
        max_running=MAX_RUNNING,
        scheduling=config.engine_options(),
        is_ranked=True,
    )


def simulated_embedder(config: Config, model: EmbeddingModel) -> SimulatedEmbedder:
    """The engine for an embedding model; tokens are characters."""
    return SimulatedEmbedder(SimulatedDevice(embedding_line(*EMBEDDING_SECONDS)), model=model.served_name)


def embedding_box_config(folder: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a box with the simulated embedding model alone, beside `box_config`."""
    chat_box = box_config(folder, sections)
    model = {"model": str(folder / "model"), "name": EMBEDDING_MODEL, "backend": "simulated"}
    return {**chat_box, "models": {"embeddings": [model]}}


def box_config(folder: Path, sections: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a box with the simulated LLM; writes the model's description into `folder`."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
    plugin = folder / "plugin" / "tandem_simulated-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-simulated\nVersion: 0\n", "utf-8")
    (plugin / "entry_points.txt").write_text(_ENTRY_POINT, encoding="utf-8")
    chat = {
        "model": str(model),
        "name": MODEL,
        "backend": "simulated",
        "engine": {"max_num_seqs": MAX_RUNNING},
    }
    return {
        "models": {"chat": chat},
        "pool": {"memory": "256MiB"},
        "classes": {CLASS: {"ttft_ms": 1e3 * TTFT_SECONDS, "tpot_ms": 1e3 * TPOT_SECONDS, "default": True}},
        "log": {"access": False},
        **(sections or {}),
    }


@contextmanager
def serving_fleet(
    folder: Path,
    boxes: int,
    *,
    routers: int = 2,
    sections: Mapping[str, Any] | None = None,
    autoscale: Mapping[str, Any] | None = None,
    more_kinds: Mapping[str, Mapping[str, Any]] | None = None,
    more_boxes: int = 2,
) -> Iterator[Server]:
    """Runs a fleet of simulated boxes on Ray Serve; its log is fleet.log in `folder`.

    `more_kinds` has the configuration of a box of each further kind, which has `more_boxes` boxes.
    """
    configs = {"box": box_config(folder, sections), **(more_kinds or {})}
    kinds: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        kinds[name] = {"config": f"{name}.yaml", "boxes": more_boxes, "gpus": 0, "cpus": 0.1}
    kinds["box"]["boxes"] = boxes
    if autoscale is not None:
        kinds["box"]["autoscale"] = dict(autoscale)
    (folder / "fleet.yaml").write_text(
        yaml.safe_dump({"kinds": kinds, "routers": routers}, sort_keys=False), encoding="utf-8"
    )
    with serving(_server(folder, "fleet", "fleet", "serve"), folder / "fleet.log") as fleet:
        yield fleet


@contextmanager
def serving_box(folder: Path) -> Iterator[Server]:
    """Runs one such box without Ray; its log is box.log in `folder`."""
    (folder / "box.yaml").write_text(yaml.safe_dump(box_config(folder)), encoding="utf-8")
    with serving(_server(folder, "box", "serve"), folder / "box.log") as box:
        yield box


def box_variables(folder: Path) -> dict[str, str]:
    """Environment variables with which a process finds the plug-in of `folder` and this checkout."""
    paths = [str(folder / "plugin"), str(_ROOT), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), _BEGUN: str(folder / BEGUN)}


def _server(folder: Path, name: str, *command: str) -> Server:
    """A command of `tandem` with the file NAME.yaml, that finds the plug-in of `folder` and this checkout."""
    variables = {
        **box_variables(folder),
        # Fixed ports by default, so that two fleets could not run on one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    port = free_port()
    words = [sys.executable, "-m", "controlplane.cli", *command, str(folder / f"{name}.yaml")]
    return Server(name, [*words, "--port", str(port)], port, "/ready", variables=variables)
