"""Embedding models and rerankers are added, replaced and removed under load, in virtual time."""

import asyncio
from collections import Counter

import pytest

from controlplane.config import ConfigError
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.request import Owner
from tests.controlplane.service.worker_bench import MOVING, ONE, QUOTA, TWO, Bench, play


def test_nothing_is_lost_under_load():
    """Each request is answered once, by the worker that it was bound to."""
    added = {"model": "b", "dimensions": [16]}
    steps = [
        {"embeddings": [{"model": "a", "max_running": 100}]},
        {"embeddings": [{"model": "a", "dimensions": [4]}, added]},
        {"embeddings": [{"model": "a"}, added], "rerankers": [{"model": "r"}]},
        {"embeddings": [added], "rerankers": [{"model": "r", "max_running": 64}]},
        {"embeddings": [{"model": "a"}]},
    ]

    async def scenario(bench: Bench) -> None:
        outcomes: Counter[str] = Counter()
        asked: Counter[str] = Counter()

        async def ask(number: int) -> None:
            await asyncio.sleep(number * 0.013)
            model = ("a", "b", "a", "r")[number % 4]
            name = f"n{number}"
            asked[name] += 1
            try:
                score = await (bench.score if model == "r" else bench.embed)(name, model)
            except Refused:
                outcomes["unknown"] += 1
            else:
                outcomes["answered"] += 1
                answered[score.ticket.request.id] += 1
                assert score.ticket.embedder in bench.built
                assert score.vectors.shape[1] == score.ticket.embedder.dimension

        answered: Counter[str] = Counter()
        asking = [asyncio.create_task(ask(number)) for number in range(1_000)]
        for models in steps:
            await bench.put(models)
            bench.service.status.ledger.check_integrity()
            served = [*models.get("embeddings", []), *models.get("rerankers", [])]
            assert {card.id for card in bench.service.status.models()} == {each["model"] for each in served}
            await asyncio.sleep(1.0)
        await asyncio.gather(*asking)
        assert outcomes.total() == 1_000
        assert set(answered.values()) == {1}
        # A model that is not served is unknown; every other request was answered.
        assert outcomes["answered"] > 500
        runs = [each.request.id for built in bench.built for each in built.runs]
        assert sorted(runs) == sorted(answered)
        assert all(each.end == "finished" for built in bench.built for each in built.runs)
        assert bench.quota == QUOTA
        assert [each.is_stopped for each in bench.built].count(False) == len(bench.service.encoders) == 1

    play(scenario)


def test_a_waiting_request_is_answered_by_the_worker_that_its_tokens_are_for():
    async def scenario(bench: Bench) -> None:
        (old,) = bench.built
        first = [asyncio.create_task(bench.embed(f"f{number}", "a")) for number in range(40)]
        await asyncio.sleep(0.01)
        assert bench.service.gate.dispatcher.queued(Owner.EMBEDDING)
        bench.load = lambda: asyncio.sleep(0)
        await bench.put({"embeddings": [{"model": "a", "dimensions": [4]}]})
        new = bench.built[-1]
        late = await bench.embed("late", "a")
        answers = await asyncio.gather(*first)
        assert {each.ticket.embedder for each in answers} == {old}
        assert {each.vectors.shape[1] for each in answers} == {8}
        assert late.ticket.embedder is new and late.vectors.shape[1] == 4
        await asyncio.sleep(0)
        assert old.is_stopped and not new.is_stopped

    play(scenario)


def test_a_worker_that_does_not_load_leaves_everything_as_it_was():
    async def scenario(bench: Bench) -> None:
        async def fail() -> None:
            await asyncio.sleep(0.5)
            raise BackendDown("embedding model 'a' does not load: no such file")

        bench.load = fail
        asking = [asyncio.create_task(bench.embed(f"n{number}", "a")) for number in range(50)]
        with pytest.raises(BackendDown, match="no such file"):
            await bench.put({"embeddings": [{"model": "a", "dimensions": [4]}]})
        assert {answer.vectors.shape[1] for answer in await asyncio.gather(*asking)} == {8}
        old, new = bench.built
        assert (old.is_stopped, new.is_stopped) == (False, True)
        assert bench.quota == QUOTA
        shown = bench.service.reconfiguration.to_json()
        assert "no such file" in shown["last_failure"]["error"]
        assert shown["workers"] == {"loading": None, "leaving": [], "reserved_bytes": 0}
        events = bench.service.status.dispatcher.recorder.records.since(0, {})
        assert b'"state":"failed"' in events
        bench.load = lambda: asyncio.sleep(0)
        await bench.put({"embeddings": [{"model": "a", "dimensions": [4]}]})
        assert (await bench.embed("again", "a")).vectors.shape[1] == 4

    play(scenario)


def test_a_dry_run_says_what_would_happen():
    async def scenario(bench: Bench) -> None:
        change = await bench.put({"embeddings": [{"model": "b"}]}, is_dry_run=True)
        workers = change.to_json()["workers"]["models"]
        assert {name: each["action"] for name, each in workers.items()} == {"b": "start", "a": "stop"}
        assert len(bench.built) == 1 and list(bench.service.encoders) == ["a"]

    play(scenario)


def test_a_stop_ends_a_change_under_way():
    async def scenario(bench: Bench) -> None:
        bench.load = asyncio.Event().wait
        change = asyncio.create_task(bench.put(TWO))
        await asyncio.sleep(0.1)
        assert bench.service.reconfiguration.to_json()["workers"]["loading"]["parts"]["b"]["stage"]
        await bench.service.stop()
        with pytest.raises(BackendDown, match="was stopped while the new workers loaded"):
            await change
        assert bench.built[-1].is_stopped

    play(scenario)


def test_a_cancelled_change_changes_nothing():
    async def scenario(bench: Bench) -> None:
        bench.load = asyncio.Event().wait
        change = asyncio.create_task(bench.put(TWO))
        await asyncio.sleep(0.1)
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
        assert bench.built[-1].is_stopped
        assert (list(bench.service.encoders), bench.quota) == (["a"], QUOTA)
        bench.load = lambda: asyncio.sleep(0)
        await bench.put(TWO)

    play(scenario)


def test_the_first_and_the_last_worker_need_a_restart():
    async def scenario(bench: Bench) -> None:
        change = await bench.put(MOVING["models"] | {"embeddings": []})
        assert "models.embeddings.0.model" in change.plan.needs_restart
        assert list(bench.service.encoders) == ["a"]

    play(scenario, MOVING)


def test_the_vectors_that_the_length_predictor_learns_from_stay():
    async def scenario(bench: Bench) -> None:
        models = {"embeddings": [{"model": "a", "normalize": False}]}
        content = {"models": models, "predictors": {"encoder": "a"}}
        with pytest.raises(ConfigError, match=r"normalize=False: predictors.encoder has learned"):
            await bench.service.reconfiguration.change(content, source="test")
        models["embeddings"] = [{"model": "a", "max_running": 7}]
        await bench.service.reconfiguration.change(content, source="test")
        assert len(bench.built) == 2

    play(scenario, {"models": ONE, "predictors": {"encoder": "a"}})


def test_counts_of_a_replaced_worker_are_kept():
    async def scenario(bench: Bench) -> None:
        bench.built[0].restarts, bench.built[0].out_of_memory = 3, 5
        await bench.put({"embeddings": [{"model": "a", "max_running": 7}]})
        await asyncio.sleep(0.1)
        assert bench.built[0].is_stopped
        assert bench.service.encoders.counts == (0, 3, 5)
        assert b"tandem_embedding_restarts_total 3.0" in bench.service.metrics_text()

    play(scenario)
