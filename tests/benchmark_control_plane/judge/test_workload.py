import csv
import itertools
import json
from statistics import median

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_schema import (
    Arrivals,
    LengthsSection,
    SharedPrefixSection,
    StreamSection,
    TraceSection,
)
from benchmark_control_plane.judge.traces import TraceColumns
from benchmark_control_plane.judge.workflow_stages import STAGES, WorkflowDeadlines, WorkflowStage
from benchmark_control_plane.judge.workload import plan_requests
from controlplane.core.request import Kind

CHAT = StreamSection(
    kind="generate",
    service_class="interactive",
    share=3,
    prompt_tokens=LengthsSection(between=(10, 90)),
    output_tokens=LengthsSection(preset="short"),
)
DOCUMENTS = StreamSection(
    kind="embed",
    service_class="documents",
    share=1,
    prompt_tokens=LengthsSection(fixed=32),
    batch=LengthsSection(between=(16, 128)),
)
RETRIEVAL = StreamSection(
    kind="retrieval",
    service_class="interactive",
    embed_class="documents",
    share=1,
    prompt_tokens=LengthsSection(fixed=500),
    output_tokens=LengthsSection(fixed=20),
    query_tokens=LengthsSection(fixed=9),
)


def plan(streams, tmp_path, rate=50.0, seed=1, warmup=10.0, measured=90.0):
    return plan_requests(streams, rate=rate, seed=seed, warmup=warmup, measured=measured, data=tmp_path)


def test_streams_have_their_shares_of_the_rate(tmp_path):
    asked = plan({"chat": CHAT, "documents": DOCUMENTS}, tmp_path)
    assert len(asked) == pytest.approx(5_000, rel=0.05)
    assert sum(one.kind is Kind.GENERATE for one in asked) / len(asked) == pytest.approx(0.75, abs=0.02)
    batches = [len(one.lengths) for one in asked if one.kind is Kind.EMBED]
    assert min(batches) == 16 and max(batches) == 128


def test_window_starts_after_the_warmup(tmp_path):
    asked = plan({"chat": CHAT}, tmp_path)
    assert asked == sorted(asked, key=lambda one: one.at)
    assert -10 <= asked[0].at < -9 and 89 < asked[-1].at < 90
    assert sum(one.is_warmup for one in asked) == pytest.approx(500, rel=0.2)


def test_changing_one_stream_changes_no_other(tmp_path):
    def chats(documents):
        # The rates of the streams stay the same; only the burstiness differs.
        asked = plan({"chat": CHAT, "documents": documents}, tmp_path)
        return [one for one in asked if one.kind is Kind.GENERATE]

    bursty = StreamSection(**vars(DOCUMENTS) | {"arrivals": Arrivals(cv=5)})
    assert chats(DOCUMENTS) == chats(bursty)


def test_same_seed_draws_the_same_requests_at_every_rate(tmp_path):
    slow = plan({"chat": CHAT}, tmp_path, rate=5)
    fast = plan({"chat": CHAT}, tmp_path, rate=50)
    lengths = [(one.prompt_tokens, one.output_tokens) for one in fast]
    assert [(one.prompt_tokens, one.output_tokens) for one in slow] == lengths[: len(slow)]
    assert plan({"chat": CHAT}, tmp_path, rate=5, seed=2) != slow


def test_retrieval_is_an_embedding_followed_by_a_generation(tmp_path):
    asked = plan({"rag": RETRIEVAL}, tmp_path)
    assert len(asked) == pytest.approx(5_000, rel=0.1)
    queries = {one.id: one for one in asked if one.kind is Kind.EMBED}
    answers = [one for one in asked if one.kind is Kind.GENERATE]
    assert len(answers) == len(queries) and {one.after for one in answers} == set(queries)
    assert all(queries[one.after].at == one.at for one in answers)
    assert {one.service_class for one in queries.values()} == {"documents"}


def test_a_retrieval_with_passages_and_a_deadline_is_a_workflow_of_three_stages(tmp_path):
    four, fifty = LengthsSection(fixed=4), LengthsSection(fixed=50)
    parts = {"passages": four, "passage_tokens": fifty, "deadline_ms": 900.0}
    asked = plan({"rag": StreamSection(**vars(RETRIEVAL) | parts)}, tmp_path)
    assert len(asked) == pytest.approx(5_000, rel=0.1)
    query, rerank, answer = (one for one in asked if one.id.startswith("rag-0-"))
    assert [one.stage.name for one in (query, rerank, answer)] == ["query", "rerank", "answer"]
    assert {(one.at, one.stage.workflow, one.stage.deadline_ms) for one in (query, rerank, answer)} == {
        (query.at, "rag-0", 900.0)
    }
    assert rerank.lengths == (50,) * 4 and rerank.kind is Kind.EMBED
    assert (rerank.after, answer.after) == (query.id, rerank.id)


@pytest.mark.parametrize(
    ("state", "shares", "stated"),
    [
        ("budgets", {"query": 0.1, "rerank": 0.4, "answer": 0.5}, [100, 400, 500]),
        ("carried", {"query": 0.1, "rerank": 0.4, "answer": 0.5}, [90, 400, 900]),
        ("remaining", {}, [900, 900, 900]),
    ],
)
def test_a_stage_states_what_the_system_names(state, shares, stated):
    """After 100 ms of 1,000."""
    deadlines = WorkflowDeadlines(state=state, shares=shares)
    stages = [deadlines.applied(WorkflowStage("w", name, 1_000.0)) for name in STAGES]
    assert [stage.stated_ms(100.0) for stage in stages] == pytest.approx(stated)


@pytest.fixture
def trace(tmp_path):
    """10 requests a second, in bursts of ten."""
    with (tmp_path / "trace.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("t", "in", "out"))
        writer.writerows((second, 100 + second, 10) for second in range(100) for _ in range(10))
    return TraceSection(
        file="trace.csv",
        columns=TraceColumns(at="t", prompt="in", output="out"),
        prompt_cap=180,
    )


def test_trace_is_replayed_with_scaled_time(tmp_path, trace):
    replay = StreamSection(kind="generate", service_class="any", share=1, trace=trace)
    asked = plan({"replay": replay}, tmp_path, rate=20)
    assert len(asked) == pytest.approx(2_000, rel=0.03)
    times = sorted({round(one.at, 6) for one in asked})
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert median(gaps) == pytest.approx(0.5, abs=0.01)
    assert max(one.prompt_tokens for one in asked) == 180
    assert min(one.prompt_tokens for one in asked) == 100


def test_trace_with_arrivals_gives_only_lengths(tmp_path, trace):
    drawn = StreamSection(kind="generate", service_class="any", share=1, trace=trace, arrivals=Arrivals())
    asked = plan({"drawn": drawn}, tmp_path, rate=20)
    assert len({one.at for one in asked}) == len(asked)
    assert {one.output_tokens for one in asked} == {10}


def test_query_lengths_are_drawn_if_the_trace_has_none(tmp_path, trace):
    rag = StreamSection(
        kind="retrieval", service_class="any", embed_class="any", share=1, trace=trace,
        query_tokens=LengthsSection(between=(3, 5)),
    )  # fmt: skip
    queries = {one.lengths for one in plan({"rag": rag}, tmp_path, rate=20) if one.kind is Kind.EMBED}
    assert queries == {(3,), (4,), (5,)}


def test_trace_with_equal_times_cannot_be_replayed(tmp_path):
    (tmp_path / "trace.csv").write_text("t,in\n5,1\n5,2\n", encoding="utf-8")
    still = TraceSection(file="trace.csv", columns=TraceColumns(at="t", prompt="in"))
    with pytest.raises(BadInput, match="all rows have the same time"):
        plan({"still": StreamSection(kind="generate", service_class="any", share=1, trace=still)}, tmp_path)


def test_recorded_prefixes_are_those_of_the_prompts_up_to_their_last_token(tmp_path):
    system = [{"id": 7, "token_length": 60}]
    rows = [{"t": at, "in": 50 + at, "pieces": {"sys_prompt": [7], "user_input": []}} for at in range(40)]
    files = {"0_trace": rows, "1_sys_prompt": system}
    for name in ("0_trace", "1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search"):
        lines = map(json.dumps, files.get(name, []))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    columns = TraceColumns(at="t", prompt="in", pieces="pieces")
    recorded = TraceSection(file="0_trace.jsonl", columns=columns)
    answers = StreamSection(kind="generate", service_class="any", share=1, trace=recorded)
    asked = plan({"answers": answers}, tmp_path, rate=2)
    assert {one.prefix_group for one in asked} == {"7"}
    assert {(one.prompt_tokens, one.prefix_tokens) for one in asked} == {
        (prompt, min(60, prompt - 1)) for prompt in range(50, 90)
    }
    with pytest.raises(ValueError, match="shared_prefix: the trace states it"):
        StreamSection(**vars(answers) | {"shared_prefix": SharedPrefixSection(3, 16)})
