import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from controlplane.service.fair_slots import FairSlots


class Work:
    """Pieces of work that end when told; `begun` lists them in the order of their starts."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def do(self, name: str) -> str:
        self.begun.append(name)
        event = self._ends.setdefault(name, asyncio.Event())
        await event.wait()
        return name

    def end(self, name: str) -> None:
        self._ends.setdefault(name, asyncio.Event()).set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ask(slots: FairSlots, work: Work, name: str) -> "asyncio.Task[str]":
    return asyncio.create_task(slots.run(name[0], lambda: work.do(name)))


async def test_tenants_that_wait_take_turns():
    slots, work = FairSlots(1), Work()
    asked = [ask(slots, work, name) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    order = ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    for count, name in enumerate(order, 1):
        await settle()
        assert work.begun == order[:count]
        work.end(name)
    assert await asyncio.gather(*asked) == ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]


async def test_no_tenant_holds_all_slots():
    slots, work = FairSlots(3), Work()
    asked = [ask(slots, work, name) for name in ("a1", "a2", "a3")]
    await settle()
    assert work.begun == ["a1", "a2"]
    asked.append(ask(slots, work, "b1"))
    await settle()
    assert work.begun == ["a1", "a2", "b1"]
    work.end("b1")
    await settle()
    assert work.begun == ["a1", "a2", "b1"], "the third slot is for other tenants"
    for name in ("a1", "a2", "a3"):
        work.end(name)
    assert await asyncio.gather(*asked) == ["a1", "a2", "a3", "b1"]


async def test_work_of_a_cancelled_caller_keeps_its_slot_until_it_ends():
    slots, work = FairSlots(1), Work()
    first, second = ask(slots, work, "a1"), ask(slots, work, "b1")
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled() and work.begun == ["a1"]
    work.end("a1")
    work.end("b1")
    assert await second == "b1"


async def test_a_cancelled_wait_passes_its_turn_on():
    slots, work = FairSlots(1), Work()
    running, leaving, waiting = (ask(slots, work, name) for name in ("a1", "b1", "c1"))
    await settle()
    leaving.cancel()
    await settle()
    work.end("a1")
    await running
    work.end("c1")
    assert await waiting == "c1"
    assert "b1" not in work.begun


async def test_a_slot_given_to_a_cancelled_caller_is_given_back():
    slots, work = FairSlots(1), Work()
    running, leaving = ask(slots, work, "a1"), ask(slots, work, "b1")
    await settle()
    work.end("a1")
    running.add_done_callback(lambda _: leaving.cancel())
    await settle()
    assert leaving.done()
    work.end("b1")
    work.end("c1")
    async with asyncio.timeout(5):
        assert await ask(slots, work, "c1") == "c1"


async def test_a_failure_frees_the_slot():
    slots, work = FairSlots(1), Work()

    async def fail() -> str:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await slots.run("a", fail)
    work.end("b1")
    assert await ask(slots, work, "b1") == "b1"


async def test_more_slots_start_work_that_waits_and_fewer_end_none():
    slots, work = FairSlots(1), Work()
    asked = [ask(slots, work, name) for name in ("a1", "b1", "c1", "d1")]
    await settle()
    assert work.begun == ["a1"]
    slots.resize(3)
    await settle()
    assert work.begun == ["a1", "b1", "c1"]
    slots.resize(1)
    work.end("a1")
    work.end("b1")
    await settle()
    assert work.begun == ["a1", "b1", "c1"]
    work.end("c1")
    await settle()
    assert work.begun == ["a1", "b1", "c1", "d1"]
    work.end("d1")
    assert await asyncio.gather(*asked) == ["a1", "b1", "c1", "d1"]


async def test_more_slots_start_all_that_one_tenant_may_have():
    slots, work = FairSlots(1), Work()
    names = ["a1", "a2", "a3", "a4"]
    asked = [ask(slots, work, name) for name in names]
    await settle()
    slots.resize(4)
    await settle()
    assert work.begun == ["a1", "a2", "a3"], "the fourth slot is for other tenants"
    for name in names:
        work.end(name)
    assert await asyncio.gather(*asked) == names


@pytest.mark.parametrize("others", [[], ["a3"]])
async def test_a_slot_that_is_freed_while_a_caller_is_cancelled_is_not_lost(others):
    slots, work = FairSlots(1), Work()
    first, gone = ask(slots, work, "a1"), ask(slots, work, "a2")
    rest = [ask(slots, work, name) for name in others]
    await settle()
    # In one iteration of the event loop: the slot becomes free and the caller that waits for it is cancelled.
    gone.cancel()
    slots.resize(3)
    with pytest.raises(asyncio.CancelledError):
        await gone
    work.end("a1")
    await settle()
    for name in [*others, "b1"]:
        work.end(name)
    assert await asyncio.gather(first, *rest, ask(slots, work, "b1")) == ["a1", *others, "b1"]
    slots.resize(1)
    work.end("c1")
    assert await ask(slots, work, "c1") == "c1"


async def test_what_is_refused_is_freed_without_garbage_collection():
    class Body:
        pass

    async def refuse(body: Body) -> None:
        raise ValueError(type(body))

    async def ask_with_a_body() -> "weakref.ref[Body]":
        body = Body()
        with suppress(ValueError):
            await FairSlots(1).run("a", lambda: refuse(body))
        return weakref.ref(body)

    gc.disable()
    try:
        body = await ask_with_a_body()
        await settle()
        assert body() is None
    finally:
        gc.enable()
