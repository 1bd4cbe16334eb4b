"""Starts two stacks that serve chat and embeddings on one machine: a naive pair of servers, and Tandem.

Both get the same models, the same vLLM arguments, and the same devices and types.
"""

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.http_client import Address, Connections, connections
from benchmark_control_plane.common.servers import (
    IN_PROCESS,
    Server,
    all_serving,
    free_port,
    tandem_server,
    vllm_server,
)
from benchmark_control_plane.experiments.gate.http_overhead import ENGINE, MODEL
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.system_schema import Live
from benchmark_control_plane.judge.systems import as_yaml
from controlplane.config.models_section import ChatModel, EmbeddingModel

# Arrivals are open-loop, so that no request may wait for a connection.
_MAX_CONNECTIONS = 1_024


@dataclass(frozen=True)
class Stack:
    """Addresses and model names of one stack."""

    name: str
    chat: Address
    embeddings: Address
    chat_model: str
    embedding_model: str

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Connections, Connections]]:
        """Open connections for chat and for embeddings."""
        async with (
            connections(self.chat, _MAX_CONNECTIONS) as chat,
            connections(self.embeddings, _MAX_CONNECTIONS) as embeddings,
        ):
            yield chat, embeddings


def models_of(experiment: Path | None) -> Live:
    """Models of an experiment's section `live`, or the bundled ones. Raises BadInput if it has no `live`."""
    if experiment is None:
        # One thread, as in configs/dev.yaml.
        embedding = EmbeddingModel("tandem/minilm", threads=1)
        return Live(ChatModel(f"tandem/{MODEL}", name=MODEL, engine=ENGINE), embedding)
    live = read_experiment(experiment, Path()).plan.live
    if live is None:
        raise BadInput(
            f"{experiment}: the section `live` is missing; name the chat and the embedding model there"
        )
    return live


@contextmanager
def both_stacks(live: Live, naive_threads: int) -> Iterator[list[Stack]]:
    """Starts the naive pair and Tandem together; yields them in this order."""
    import torch

    in_process = {} if torch.cuda.is_available() else IN_PROCESS
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            vllm_server(live.chat.model, live.chat.served_name, {**in_process, **live.chat.engine}),
            plain_embeddings(live.embedding, naive_threads),
            _tandem(live, folder),
        ]
        logged = [(server, folder / f"{server.name}.log") for server in servers]
        chat, embeddings, tandem = exits.enter_context(all_serving(logged, own_session=False))
        names = live.chat.served_name, live.embedding.served_name
        naive = Stack("naive", Address.of(chat.url), Address.of(embeddings.url), *names)
        yield [naive, Stack("tandem", Address.of(tandem.url), Address.of(tandem.url), *names)]


def plain_embeddings(model: EmbeddingModel, threads: int) -> Server:
    """The command of the naive embedding server."""
    port = free_port()
    module = "benchmark_control_plane.experiments.collocation.plain_embeddings"
    command = [sys.executable, "-m", module, model.model, "--port", str(port)]
    for name, value in (("--device", model.device), ("--dtype", model.dtype)):
        command += [name, value] if value is not None else []
    if model.trust_remote_code:
        command.append("--trust-remote-code")
    return Server("plain-embeddings", command, port, "/health", threads=threads)


def _tandem(live: Live, folder: Path) -> Server:
    config = {
        "models": {"chat": as_yaml(live.chat), "embeddings": [as_yaml(live.embedding)]},
        "pool": {"memory": live.pool_memory},
        "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}},
        "classes": {
            "interactive": {
                "priority": 1,
                "ttft_ms": 1_000,
                "tpot_ms": 50,
                "sheddable": False,
                "default": True,
            },
            "indexing": {"priority": 0, "sheddable": False},
        },
    }
    return tandem_server(config, folder / "tandem.yaml")
