"""Membership by kind, and the choice of a box over all kinds, without a cluster."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad
from tests.controlplane.fleet_on_ray.ray_marks import NEEDS_RAY

pytestmark = NEEDS_RAY

CHAT = "path=%2Fv1%2Fcompletions&bytes=400&class=chat"
EMBED = "path=%2Fv1%2Fembeddings&bytes=400&class=chat"


def replica(name: str) -> Any:
    """What is read of Ray's `RunningReplica`; without an address it is not polled."""
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), backend_http_endpoint=None)


def report(intercept: float, owner: str = "llm", *, serves: bool = True) -> LoadReport:
    models = {f"{owner}-model": ModelLoad(owner, 1e-5, 10)} if serves else {}
    return LoadReport("epoch", 1, 0.0, models, {owner: OwnerLoad({"chat": intercept}, 0.0, 10**9)})


@pytest.fixture
def boxes() -> Iterator[Any]:
    """What a process of routers knows: boxes `near` and `far` of one kind, `search` of another."""
    from controlplane.fleet_on_ray.known_boxes import KnownBoxes

    async def made() -> Any:
        found = KnownBoxes("key")
        found.set_replicas("/", [replica("near"), replica("far")], 1.0)
        found.set_replicas("/-tandem/search", [replica("search")], 3.0)
        return found

    yield asyncio.run(made())


def chosen(boxes: Any, query: str = CHAT, times: int = 20) -> set[str | None]:
    async def choose() -> set[str | None]:
        found = [await boxes.choose(query, 0.01) for _ in range(times)]
        return {None if each is None else each.replica_id.unique_id for each in found}

    return asyncio.run(choose())


def test_the_box_with_the_shorter_forecast_is_chosen(boxes: Any) -> None:
    boxes.polls.heard("near", report(0.1))
    boxes.polls.heard("far", report(5.0))
    assert chosen(boxes) == {"near"}


def test_a_request_goes_to_the_kind_that_serves_it(boxes: Any) -> None:
    boxes.polls.heard("near", report(9.0))
    boxes.polls.heard("search", report(0.1, "embedding"))
    assert chosen(boxes) == {"near"}
    assert chosen(boxes, EMBED) == {"search"}


def test_a_box_that_does_not_serve_the_model_is_left_out(boxes: Any) -> None:
    boxes.polls.heard("near", report(0.1, serves=False))
    boxes.polls.heard("far", report(5.0))
    assert chosen(boxes) == {"far"}


def test_a_box_where_one_of_several_encoders_is_down_gets_no_embeddings(boxes: Any) -> None:
    """The router does not know which one a request names, and such a box refuses at once and looks idle."""
    both = {name: ModelLoad("embedding", 1e-6, 0) for name in ("embed", "rerank")}
    waits = {"embedding": OwnerLoad({"chat": 0.1}, 0.0, 10**9)}
    boxes.polls.heard("far", LoadReport("a", 1, 0.0, {"rerank": both["rerank"]}, waits))
    for name in ("near", "search"):
        busy = {"embedding": OwnerLoad({"chat": 5.0}, 0.0, 10**9)}
        boxes.polls.heard(name, LoadReport("a", 1, 0.0, both, busy))
    assert chosen(boxes, EMBED, times=50) == {"near", "search"}


def test_where_none_serves_the_model_a_box_that_has_it_says_so(boxes: Any) -> None:
    boxes.polls.heard("near", report(0.1, serves=False))
    boxes.polls.heard("search", report(0.1, "embedding"))
    assert chosen(boxes) == {"near"}


def test_without_a_box_of_that_work_any_box_answers(boxes: Any) -> None:
    for name in ("near", "search"):
        boxes.polls.heard(name, report(0.1))
    assert chosen(boxes, EMBED) == {"near", "search"}


def test_while_the_kind_that_may_serve_a_request_is_silent_none_is_chosen(boxes: Any) -> None:
    """Another kind would answer 404, after which a client does not come back."""
    boxes.polls.heard("search", report(0.1, "embedding"))
    assert chosen(boxes) == {None}
    assert chosen(boxes, EMBED) == {"search"}


def test_without_a_living_box_none_is_chosen(boxes: Any) -> None:
    assert chosen(boxes, times=1) == {None}


def test_draws_are_in_proportion_to_the_weight_of_a_kind(boxes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("near", "far", "search"):
        boxes.polls.heard(name, report(0.1))
    draws = iter([(number % 100 / 100, number // 100 / 100) for number in range(10_000)])
    single = iter([])
    monkeypatch.setattr("random.random", lambda: next(single))
    found = {"near": 0, "far": 0, "search": 0}
    for first, second in draws:
        single = iter([first, second])
        found[boxes._choose(CHAT)] += 1
    assert found["search"] > found["near"] + found["far"]


async def test_a_request_waits_for_a_box_that_joins(boxes: Any) -> None:
    waiting = asyncio.create_task(boxes.choose(CHAT, 5.0))
    await asyncio.sleep(0)
    boxes.polls.heard("far", report(0.1))
    assert (await waiting).replica_id.unique_id == "far"


def test_the_routers_of_all_kinds_in_a_process_share_what_they_know() -> None:
    from controlplane.fleet_on_ray.box_router import BoxMembership
    from controlplane.fleet_on_ray.known_boxes import known_boxes

    async def states() -> list[Any]:
        found = []
        for path in ("/", "/-tandem/search"):
            router = object.__new__(BoxMembership)
            router.initialize_state(router_key="shared", path=path, weight=1.0)
            found.append(router._boxes)
        return found

    assert asyncio.run(states()) == [known_boxes("shared")] * 2
