"""Prompts of a stream with shared prefixes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_control_plane.judge.experiment_schema import (
    LengthsSection,
    SharedPrefixSection,
    StreamSection,
)
from benchmark_control_plane.judge.prompts import prompt_ids, prompt_text
from benchmark_control_plane.judge.workload import PlannedRequest, plan_requests
from controlplane.core.request import Kind


def planned(name: str, group: str, shared: int, prompt: int) -> PlannedRequest:
    return PlannedRequest(
        name, 0.0, Kind.GENERATE, "any", prompt_tokens=prompt, output_tokens=1,
        prefix_group=group, prefix_tokens=shared,
    )  # fmt: skip


@given(shared=st.integers(0, 60), more=st.tuples(st.integers(8, 40), st.integers(8, 40)))
def test_prompts_of_a_group_begin_alike_and_differ_after_it(shared, more):
    first, second = (planned(f"r{n}", "g", shared, shared + extra) for n, extra in enumerate(more))
    draw = random.Random(1)
    for prompt, parts in ((prompt_ids, list), (prompt_text, str.split)):
        one, other = parts(prompt(first, draw)), parts(prompt(second, draw))
        assert (len(one), len(other)) == (first.prompt_tokens, second.prompt_tokens)
        assert one[:shared] == other[:shared]
        assert one[shared : shared + 8] != other[shared : shared + 8]


def test_prompts_of_different_groups_share_nothing():
    draw = random.Random(1)
    one, other = (prompt_ids(planned("r", group, 100, 101), draw) for group in ("a", "b"))
    assert one[:16] != other[:16]


def test_a_shared_prefix_changes_neither_times_nor_lengths(tmp_path):
    chat = {
        "kind": "generate", "service_class": "any", "share": 1,
        "prompt_tokens": LengthsSection(between=(1, 400)), "output_tokens": LengthsSection(fixed=5),
    }  # fmt: skip
    plain, shared = (
        plan_requests(
            {"chat": StreamSection(**chat, shared_prefix=prefix)},
            rate=50, seed=3, warmup=0, measured=20, data=tmp_path,
        )
        for prefix in (None, SharedPrefixSection(groups=4, tokens=200))
    )  # fmt: skip
    assert [(r.at, r.prompt_tokens, r.output_tokens) for r in plain] == [
        (r.at, r.prompt_tokens, r.output_tokens) for r in shared
    ]
    assert {request.prefix_group for request in shared} == {f"chat-{group}" for group in range(4)}
    assert all(request.prefix_tokens == min(200, request.prompt_tokens - 1) for request in shared)
    assert {(request.prefix_group, request.prefix_tokens) for request in plain} == {("", 0)}


def test_an_embedding_stream_takes_no_shared_prefix():
    with pytest.raises(ValueError, match="shared_prefix: kind: embed takes none"):
        StreamSection(
            kind="embed", service_class="any", share=1, prompt_tokens=LengthsSection(fixed=5),
            shared_prefix=SharedPrefixSection(groups=1, tokens=5),
        )  # fmt: skip
