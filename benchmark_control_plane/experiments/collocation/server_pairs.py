"""Which two stacks serve chat and embeddings beside each other? A naive pair of servers, and Tandem.

Rule: both are given the same models, the same vLLM arguments and the same devices and types.
"""

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.http_client import Address, Connections, connections
from benchmark_control_plane.common.servers import (
    Server,
    all_serving,
    free_port,
    tandem_server,
    vllm_server,
)
from benchmark_control_plane.experiments.gate.http_overhead import ENGINE, MODEL
from benchmark_control_plane.judge.experiment import read_experiment
from benchmark_control_plane.judge.experiment_schema import Live
from benchmark_control_plane.judge.systems import stated
from controlplane.config.models import ChatModel, EmbeddingModel

# Open-loop: nobody is to wait for a place.
_MOST_AT_ONCE = 1_024


@dataclass(frozen=True)
class Stack:
    """Where the chat and the embeddings of one of the two are served, and by what names."""

    name: str
    chat: Address
    embeddings: Address
    chat_model: str
    embedding_model: str

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Connections, Connections]]:
        async with (
            connections(self.chat, _MOST_AT_ONCE) as chat,
            connections(self.embeddings, _MOST_AT_ONCE) as embeddings,
        ):
            yield chat, embeddings


def models_of(experiment: Path | None) -> Live:
    """The small ones where none is given. Raises BadInput."""
    if experiment is None:
        embedding = EmbeddingModel("tandem/minilm", threads=os.cpu_count() or 1)
        return Live(ChatModel(f"tandem/{MODEL}", name=MODEL, engine=ENGINE), embedding)
    live = read_experiment(experiment, Path()).plan.live
    if live is None:
        raise BadInput(f"{experiment}: no section live; state the chat and the embedding model there")
    return live


@contextmanager
def both_stacks(live: Live, naive_threads: int) -> Iterator[list[Stack]]:
    """The naive pair, then Tandem, all up at once."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            vllm_server(live.chat.model, live.chat.served_name, live.chat.engine),
            plain_embeddings(live.embedding, naive_threads),
            _tandem(live, folder),
        ]
        logged = [(server, folder / f"{server.name}.log") for server in servers]
        chat, embeddings, tandem = exits.enter_context(all_serving(logged, own_session=False))
        names = live.chat.served_name, live.embedding.served_name
        naive = Stack("naive", Address.of(chat.url), Address.of(embeddings.url), *names)
        yield [naive, Stack("tandem", Address.of(tandem.url), Address.of(tandem.url), *names)]


def plain_embeddings(model: EmbeddingModel, threads: int) -> Server:
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
        "models": {"chat": stated(live.chat), "embeddings": [stated(live.embedding)]},
        "pool": {"memory": live.pool_memory},
        # Nearer to the promise than by default: the promise is all that is asked for here.
        "scheduling": {"engine": {"decode_pace": 0.9}},
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
