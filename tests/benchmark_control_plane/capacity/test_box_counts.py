"""Numbers of boxes by the integer program, compared with hand-made cases and with trying all numbers."""

import random
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmark_control_plane.capacity.box_counts import BoxCounts, OfferedKind, count_boxes

CHAT, EMBED = "chat/llm", "search/embedding"


def numbers(found: BoxCounts) -> dict[str, int]:
    return {count.name: count.boxes for count in found.counts}


def kinds(**most: int) -> list[OfferedKind]:
    """Boxes for 10 chats or 100 embeddings per second if they serve both; dedicated ones serve half more."""
    every = {
        "both": OfferedKind("both", 1, {CHAT: 0.1, EMBED: 0.01}, 50),
        "chat": OfferedKind("chat", 1, {CHAT: 1 / 15}, 50),
        "search": OfferedKind("search", 1, {EMBED: 1 / 150}, 50),
    }
    return [
        OfferedKind(name, kind.cost, kind.work, most.get(name, 0))
        for name, kind in every.items()
        if name in most
    ]


def test_one_kind_is_its_work_over_the_utilisation() -> None:
    found = count_boxes({CHAT: 30.0, EMBED: 100.0}, kinds(both=50), 0.8)
    # 3 box-seconds per second of chat and 1 of embeddings.
    assert numbers(found) == {"both": 5}
    assert found.served == 1 and found.short == ()
    assert found.counts[0].utilisation == pytest.approx(4 / 5)
    assert found.counts[0].rates == pytest.approx({CHAT: 30.0, EMBED: 100.0}, rel=1e-4)


def test_a_mixed_box_takes_the_remainder_of_two_dedicated_kinds() -> None:
    # Dedicated alone: 3 and 2 boxes. One mixed box takes what is left of both.
    demand = {CHAT: 15 * 2 + 4.0, EMBED: 150 * 1 + 50.0}
    assert sum(numbers(count_boxes(demand, kinds(chat=50, search=50), 1.0)).values()) == 5
    found = count_boxes(demand, kinds(both=50, chat=50, search=50), 1.0)
    assert numbers(found) == {"both": 1, "chat": 2, "search": 1}


def test_fewer_gpus_precede_fewer_boxes() -> None:
    large = OfferedKind("large", 4, {CHAT: 1 / 30}, 10)
    small = OfferedKind("small", 1, {CHAT: 1 / 10}, 10)
    assert numbers(count_boxes({CHAT: 30.0}, [large, small], 1.0)) == {"large": 0, "small": 3}
    cheap = OfferedKind("large", 3, {CHAT: 1 / 30}, 10)
    assert numbers(count_boxes({CHAT: 30.0}, [cheap, small], 1.0)) == {"large": 1, "small": 0}


def test_the_work_is_spread_evenly() -> None:
    unequal = [OfferedKind(name, 1, {CHAT: 0.1}, 1) for name in ("first", "second")]
    found = count_boxes({CHAT: 10.0}, unequal, 0.8)
    assert [count.utilisation for count in found.counts] == pytest.approx([0.5, 0.5], rel=1e-4)


def test_a_demand_beyond_the_most_boxes_is_served_in_part() -> None:
    found = count_boxes({CHAT: 60.0, EMBED: 75.0}, kinds(chat=2, search=1), 1.0)
    assert numbers(found) == {"chat": 2, "search": 1}
    assert found.served == pytest.approx(0.5)
    # The embeddings' box has room, so more embeddings could be served but no more chats.
    assert found.short == (CHAT,)
    assert [count.utilisation for count in found.counts] == pytest.approx([1.0, 0.25], rel=1e-4)


def test_a_part_that_no_kind_serves_is_named() -> None:
    found = count_boxes({CHAT: 1.0, EMBED: 1.0}, kinds(chat=2), 1.0)
    assert (found.served, found.short) == (0.0, (EMBED,))
    assert count_boxes({CHAT: 1.0}, [OfferedKind("idle", 1, {}, 3)], 1.0).served == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_no_cheaper_numbers_serve_the_demand(seed: int) -> None:
    draws = random.Random(seed)
    demand = {part: draws.uniform(1, 60) for part in ("a", "b", "c")[: draws.randint(1, 3)]}
    offered = [
        OfferedKind(
            f"kind-{k}",
            draws.randint(1, 3),
            {part: draws.uniform(0.02, 0.2) for part in demand if draws.random() < 0.8},
            3,
        )
        for k in range(3)
    ]
    found = count_boxes(demand, offered, 0.8)
    possible = [
        boxes for boxes in product(range(4), repeat=3) if can_serve(boxes, demand, offered, utilisation=0.8)
    ]
    assert (found.served == 1) == bool(possible)
    if possible:
        chosen = tuple(numbers(found).values())
        assert chosen in possible
        assert cost(chosen, offered) == min(cost(boxes, offered) for boxes in possible)
        assert max(count.utilisation for count in found.counts) <= 0.8 + 1e-6
        for part, rate in demand.items():
            assert sum(count.rates.get(part, 0.0) for count in found.counts) == pytest.approx(rate, rel=1e-4)
    else:
        assert 0 <= found.served < 1 and found.short


def cost(boxes: tuple[int, ...], offered: list[OfferedKind]) -> tuple[float, int]:
    return sum(n * kind.cost for n, kind in zip(boxes, offered, strict=True)), sum(boxes)


def can_serve(
    boxes: tuple[int, ...], demand: dict[str, float], offered: list[OfferedKind], utilisation: float
) -> bool:
    """Whether rates exist that keep each kind below the utilisation."""
    pairs = [(k, part) for k, kind in enumerate(offered) for part in demand if part in kind.work]
    if {part for _, part in pairs} != set(demand):
        return False
    work = np.array(
        [[offered[k].work[part] if k == of else 0.0 for k, part in pairs] for of in range(len(offered))]
    )
    parts = np.array([[float(own == part) for _, own in pairs] for part in demand])
    found = linprog(
        np.zeros(len(pairs)),
        A_ub=work,
        b_ub=utilisation * np.array(boxes),
        A_eq=parts,
        b_eq=list(demand.values()),
    )
    return found.status == 0
