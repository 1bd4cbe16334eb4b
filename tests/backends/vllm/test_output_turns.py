"""The event loop runs between the steps whose outputs vLLM's client decodes and converts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

STEPS = 8


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._task.cancel()


def client_of(socket: Any, decoded: list[int], turns: Turns) -> Any:
    """vLLM's client of an engine whose messages come from `socket`; `decoded` gets the turn of each."""
    from vllm.v1.engine.core_client import AsyncMPClient

    def decode(frames: list[Any]) -> SimpleNamespace:
        decoded.append(turns.count)
        return SimpleNamespace(utility_output=None, outputs=[bytes(frames[0])], scheduler_stats=None)

    client = object.__new__(AsyncMPClient)
    client.resources = SimpleNamespace(
        output_queue_task=None, output_socket=socket, validate_alive=lambda frames: None
    )
    client.decoder, client.utility_results = SimpleNamespace(decode=decode), {}
    client.outputs_queue = asyncio.Queue()
    return client


async def test_the_outputs_of_one_step_are_handled_in_a_turn():
    import zmq.asyncio

    from backends.vllm.output_turns import take_turns

    take_turns()
    take_turns()
    context = zmq.asyncio.Context()
    engine, socket = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        engine.bind("inproc://outputs")
        socket.connect("inproc://outputs")
        for step in range(STEPS):
            await engine.send(b"%d" % step)
        turns, decoded, taken, outputs = Turns(), [], [], []
        client = client_of(socket, decoded, turns)
        client._ensure_output_queue_task()
        for _ in range(100):
            await asyncio.sleep(0)
        assert client.outputs_queue.qsize() == STEPS
        for _ in range(STEPS):
            outputs += (await client.get_output_async()).outputs
            taken.append(turns.count)
        client.resources.output_queue_task.cancel()
        turns.stop()
    finally:
        context.destroy(linger=0)
    assert outputs == [b"%d" % step for step in range(STEPS)]
    assert len(set(decoded)) == len(set(taken)) == STEPS


async def test_a_client_that_waits_gets_the_outputs_of_the_next_step():
    from backends.vllm.output_turns import take_turns

    take_turns()
    turns = Turns()
    client = client_of(None, [], turns)
    client.resources.output_queue_task = object()
    waiting = asyncio.create_task(client.get_output_async())
    await asyncio.sleep(0)
    client.outputs_queue.put_nowait("outputs")
    assert await waiting == "outputs"
    turns.stop()
