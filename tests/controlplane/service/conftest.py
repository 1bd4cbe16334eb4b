from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.service.bootstrap import build_service
from controlplane.service.runtime.timers import LoopClock
from tests.controlplane.service.scripted_bench import CLASSES, Bench

if TYPE_CHECKING:
    from tests.controlplane.service.otlp_receiver import Receiver


@pytest.fixture
def bench() -> Callable[..., None]:
    """Runs `scenario(bench)` on virtual time, then checks that nothing is held."""

    def play(scenario, *, generator=None, embedder=None, ticks=None, **sections: object) -> Bench:
        async def main() -> Bench:
            llm = generator or ScriptedGenerator(prefill_seconds=0.1, token_seconds=0.05)
            vectors = embedder or ScriptedEmbedder(call_seconds=0.1)
            content = {"models": {"chat": {"model": "scripted"}}, "classes": CLASSES, **sections}
            service = build_service(
                parse(content), [llm], [vectors],
                workspace_bytes=2 * vectors.workspace_bytes, ticks=ticks, clock=LoopClock(),
            )  # fmt: skip
            await service.start()
            one = Bench(service, llm, vectors)
            _remember_ends(one)
            await scenario(one)
            one.assert_nothing_is_held()
            await service.stop()
            return one

        return run(main())

    return play


@pytest.fixture
def receiver() -> "Iterator[Receiver]":
    """An OTLP/HTTP receiver; a test that needs it is skipped without the extra `otel`."""
    pytest.importorskip("opentelemetry.proto")
    from tests.controlplane.service.otlp_receiver import Receiver

    found = Receiver()
    yield found
    found.close()


def _remember_ends(one: Bench) -> None:
    accounting = one.service.gate.dispatcher.accounting
    end = accounting.end

    def remembering(ticket, now, outcome):
        end(ticket, now, outcome)
        one.ended.append(ticket)

    accounting.end = remembering  # type: ignore[method-assign]
