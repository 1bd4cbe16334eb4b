"""Workers leave when no request is bound to them, and their counts stay."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.service.encoder_registry import EncoderRegistry


def scripted(model: str, dimension: int = 8) -> ScriptedEmbedder:
    return ScriptedEmbedder(model=model, dimension=dimension)


async def test_a_worker_leaves_when_its_last_request_has_ended():
    old, new = scripted("a"), scripted("a")
    registry = EncoderRegistry([old])
    with registry.bound(old):
        assert registry.switch({"a": new}, {}, ()) == [old]
        assert (registry["a"], registry.running) == (new, [new, old])
        leaving = asyncio.create_task(registry.until_unbound(old))
        with registry.bound(old), registry.bound(new):
            assert registry.bound_requests(old) == 2
        await asyncio.sleep(0)
    # Bound again in the same step: a request passes from tokenization to the gate.
    with registry.bound(old):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not leaving.done()
    await leaving
    registry.stopped(old)
    assert registry.running == [new]


async def test_a_model_may_become_a_reranker():
    registry, added = EncoderRegistry([scripted("a"), scripted("b")]), []
    registry.on_added.append(added.append)
    reranker = scripted("a", 2)
    (gone,) = registry.switch({}, {"a": reranker}, ())
    assert gone is not reranker
    assert (list(registry), list(registry.embedders), list(registry.rerankers)) == (["b", "a"], ["b"], ["a"])
    assert added == [reranker]
    registry.switch({}, {}, ["b"])
    assert (list(registry), len(registry)) == (["a"], 1)
    with pytest.raises(KeyError):
        registry["b"]


async def test_counts_include_those_of_stopped_workers():
    old, new = scripted("a"), scripted("a")
    registry = EncoderRegistry([old])
    old.stall_count, old.restarts, old.out_of_memory = 1, 2, 3
    registry.switch({"a": new}, {}, ())
    new.restarts = 10
    assert registry.counts == (1, 12, 3)
    registry.stopped(old)
    assert registry.counts == (1, 12, 3)
