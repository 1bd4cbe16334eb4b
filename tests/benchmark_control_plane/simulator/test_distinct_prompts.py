"""Simulated prompts share tokens as planned."""

from benchmark_control_plane.simulator.distinct_prompts import prompt_ids


def test_prompts_share_the_prefix_of_their_group_and_nothing_else():
    one, other, same = (
        list(prompt_ids(number, 50, group=group, shared=20)) for number, group in enumerate((0, 1, 0))
    )
    alone = set(prompt_ids(3, 50, group=0, shared=0))
    assert len(one) == len(set(one)) == len(alone) == 50
    assert one[:20] == same[:20]
    assert not set(one) & set(other) and not set(one[20:]) & set(same[20:])
    assert not alone & {*one, *other, *same}
