"""Homes of sessions and named prefixes."""

from collections import Counter

from controlplane.fleet.affinity import PrefixHomes

BOXES = [f"box-{at}" for at in range(20)]
PREFIXES = [f"prefix-{at}" for at in range(2_000)]


def first_homes(names: list[str], weights: list[float]) -> dict[str, str]:
    homes = PrefixHomes(names, weights)
    return {prefix: homes.of(prefix)[0] for prefix in PREFIXES}


def test_homes_are_two_different_boxes_or_the_only_one() -> None:
    homes = PrefixHomes(BOXES, [1.0] * 20)
    assert all(len(set(homes.of(prefix))) == 2 for prefix in PREFIXES)
    assert homes.of(None) == []
    assert PrefixHomes(BOXES[:1], [1.0]).of("p") == BOXES[:1]


def test_shares_are_those_of_the_weights() -> None:
    found = Counter(first_homes(BOXES, [3.0] * 10 + [1.0] * 10).values())
    heavy = sum(found[box] for box in BOXES[:10])
    assert 0.71 < heavy / 2_000 < 0.79
    assert all(80 < found[box] < 220 for box in BOXES[:10])


def test_a_box_that_leaves_moves_only_its_own_prefixes() -> None:
    before, after = first_homes(BOXES, [1.0] * 20), first_homes(BOXES[1:], [1.0] * 19)
    moved = {prefix for prefix in PREFIXES if before[prefix] != after[prefix]}
    assert moved == {prefix for prefix in PREFIXES if before[prefix] == "box-0"}


def test_no_name_of_a_client_is_kept() -> None:
    homes = PrefixHomes(BOXES, [1.0] * 20)
    found = homes.of("ada@example.org")
    assert "ada" not in repr(vars(homes))
    assert homes.of("ada@example.org") is found
