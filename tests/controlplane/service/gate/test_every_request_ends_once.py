"""Each accepted request ends once, with one outcome and no lease, whatever clients and engines do."""

import asyncio
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from backends.testing.scripted import Script, ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

CLASSES = {
    "high": {"priority": 9, "ttft_ms": 400},
    "normal": {"priority": 3, "e2e_ms": 5000},
    "low": {"priority": 0, "sheddable": False, "default": True},
}
SCRIPTS = [Script(), Script(tokens=3), Script(request_fails_after=0), Script(request_fails_after=5)]

plans = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 3_000),
            "is_embedding": st.booleans(),
            "service_class": st.sampled_from(sorted(CLASSES)),
            "size": st.integers(1, 200),
            "max_tokens": st.integers(1, 60),
            "script": st.integers(0, len(SCRIPTS) - 1),
            "leaves_after": st.none() | st.integers(0, 4_000),
        }
    ),
    min_size=1,
    max_size=30,
)


async def ask(service: Service, wish: dict) -> None:
    await asyncio.sleep(wish["at"] / 1_000)
    caller, hints = Caller("t"), RequestHints(service_class=wish["service_class"])
    if wish["is_embedding"]:
        job = await service.intake.embeddings(
            RequestOrigin("e", caller, hints), "vectors", ["x" * wish["size"]]
        )
        await service.gate.embed(job)
        return
    limit = wish["max_tokens"]
    sampling = Sampling(max_tokens=limit)
    text = "x" * wish["size"]
    job = await service.intake.completion(
        RequestOrigin("g", caller, hints), "llm", text, max_tokens=limit, sampling=sampling
    )
    answer = await service.gate.generate(job)
    tokens = [token async for delta in answer for token in delta.token_ids]
    # A resumed request follows the next script, so only the length of a complete one is known exactly.
    assert 0 < len(tokens) <= limit


async def client(service: Service, wish: dict) -> str:
    asking = asyncio.create_task(ask(service, wish))
    patience = None if wish["leaves_after"] is None else wish["leaves_after"] / 1_000
    try:
        async with asyncio.timeout(patience):
            await asking
    except TimeoutError:
        return "aborted"
    except Rejected:
        return "rejected"
    except (BackendFailed, BackendDown):
        return "failed"
    return "finished"


async def play(plan: list[dict], *, dies_at: float | None, has_tandem_scheduler: bool) -> None:
    llm = ScriptedGenerator(
        model="llm", max_running=3, kv_bytes=24 * 16 * 1_024, prefill_seconds=0.05, token_seconds=0.03,
        has_tandem_scheduler=has_tandem_scheduler,
    )  # fmt: skip
    vectors = ScriptedEmbedder(model="vectors", batch_tokens=256, max_input_tokens=256, call_seconds=0.1)
    content = {
        "models": {"chat": {"model": "llm"}},
        "classes": CLASSES,
        "admission": {"max_wait_ms": 2_000, "max_waiting": 5, "engine_queue": 1},
        "scheduling": {"engine": {} if has_tandem_scheduler else "off"},
    }
    service = build_service(
        parse(content), [llm], [vectors], workspace_bytes=2 * vectors.workspace_bytes, clock=LoopClock()
    )
    await service.start()
    llm.upcoming.extend(SCRIPTS[wish["script"]] for wish in plan if not wish["is_embedding"])
    if dies_at is not None:
        asyncio.get_running_loop().call_later(dies_at, llm.die)
    seen = Counter(await asyncio.gather(*(client(service, wish) for wish in plan)))
    dispatcher = service.gate.dispatcher
    dispatcher.ledger.check_integrity()
    assert [dispatcher.ledger.demanded(owner) for owner in Owner] == [0, 0]
    assert dispatcher.tickets() == ()
    assert [len(dispatcher.queued(owner)) for owner in Owner] == [0, 0]
    assert sum(seen.values()) == len(plan)
    counted = Counter()
    for family in service.status.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "tandem_requests_total":
                counted[sample.labels["outcome"]] += int(sample.value)
    # A client may leave before its request reaches the gate, or at the instant of its end; once the engine
    # is dead, requests fail at the tokenizer.
    unseen = seen["aborted"] + (seen["failed"] if dies_at is not None else 0)
    assert len(plan) - unseen <= sum(counted.values()) <= len(plan)
    assert counted["met"] + counted["late"] >= seen["finished"]
    assert counted["rejected"] >= seen["rejected"]
    assert counted["evicted"] == 0
    await service.stop()


@pytest.mark.long
@settings(max_examples=150, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(plan=plans, dies_at=st.none() | st.floats(0, 4), has_tandem_scheduler=st.booleans())
def test_each_request_ends_once_and_holds_nothing(plan, dies_at, has_tandem_scheduler):
    run(play(plan, dies_at=dies_at, has_tandem_scheduler=has_tandem_scheduler))
