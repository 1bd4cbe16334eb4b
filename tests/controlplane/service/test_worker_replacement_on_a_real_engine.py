"""MiniLM is replaced by itself with other options, served under a second name, and removed, under load."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from controlplane.config import parse
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.request import Owner
from controlplane.service.bootstrap import assemble
from controlplane.service.request_jobs import Caller, RequestOrigin
from controlplane.service.service import Service

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

POOL = {"memory": "6GiB", "monitor_ms": 0}
TEXTS = ["a queue of requests", "memory that two models share", "x " * 90]
FIRST = {
    "model": "tandem/minilm",
    "name": "first",
    "batch_tokens": 512,
    "max_input_tokens": 128,
    "threads": 1,
}
SCALED = {**FIRST, "normalize": True, "max_input_tokens": 64, "batch_tokens": 256}
SECOND = {**FIRST, "name": "second"}


@dataclass
class Load:
    """Clients that ask both models in turn; `tickets` counts the answers by request."""

    service: Service
    refused: int = 0
    tickets: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def ask(self, client: int) -> None:
        number = 0
        while not self.is_over:
            number += 1
            await self._ask_once(f"c{client}n{number}", ("first", "second")[number % 2], TEXTS[number % 3])

    async def _ask_once(self, name: str, model: str, text: str) -> None:
        try:
            origin = RequestOrigin(name, Caller("t"))
            job = await self.service.intake.embeddings(origin, model, [text])
            answer = await self.service.gate.embed(job)
        except Refused as error:
            # A model that is not served, or a text that exceeds the limit of the new worker.
            assert f"{model!r} does not exist" in str(error) or "accepts at most 64" in str(error)
            self.refused += 1
            await asyncio.sleep(0.01)
            return
        self.tickets[answer.ticket.request.id] += 1
        assert answer.vectors.shape == (1, 384)
        assert np.linalg.norm(answer.vectors) == pytest.approx(1.0, abs=1e-3)

    async def put(self, *models: dict[str, Any]) -> None:
        content = {"models": {"embeddings": list(models)}, "pool": POOL}
        change = await self.service.reconfiguration.change(content, source="test")
        assert change.plan.applied and not change.plan.needs_restart
        self.service.status.ledger.check_integrity()


async def replaced(load: Load) -> None:
    """Replaces and adds in one change, since a load takes seconds, then removes."""
    encoders = load.service.encoders
    old = encoders["first"]
    await load.put(SCALED, SECOND)
    assert encoders["first"] is not old
    assert encoders["first"].max_input_tokens == 64
    assert [card.id for card in load.service.status.models()] == ["first", "second"]
    await load.service.check()
    await load.put(SECOND)
    async with asyncio.timeout(10):
        while encoders.leaving:  # noqa: ASYNC110 (the end of a process rings no bell)
            await asyncio.sleep(0.01)
    with pytest.raises(BackendDown, match="stopped"):
        await old.check()


@pytest.mark.slow
async def test_every_request_is_answered_once_while_minilm_is_replaced():
    service = assemble(parse({"models": {"embeddings": [FIRST]}, "pool": POOL}))
    await service.start()
    ledger, load = service.status.ledger, Load(service)
    quota = ledger.quota(Owner.EMBEDDING)
    asking = [asyncio.create_task(load.ask(client)) for client in range(6)]
    try:
        await replaced(load)
    finally:
        load.is_over = True
        await asyncio.gather(*asking)
    ledger.check_integrity()
    assert (ledger.held(Owner.EMBEDDING), ledger.quota(Owner.EMBEDDING)) == (0, quota)
    assert load.tickets.total() > 100
    assert set(load.tickets.values()) == {1}
    ended = Counter(str(ticket.outcome) for ticket in service.status.dispatcher.recorder.kept)
    assert set(ended) == {"met"}
    await service.stop()
