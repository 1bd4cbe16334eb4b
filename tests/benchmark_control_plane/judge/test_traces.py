import gzip
import json
import os
from pathlib import Path

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.prompt_pieces import MANY
from benchmark_control_plane.judge.traces import NAMED, TraceColumns, TracedRequest, read_trace

DATA = Path(os.environ.get("TANDEM_DATA") or Path("..") / "shared" / "data")
COLUMNS = TraceColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def test_timestamps_become_seconds_since_the_first_row(tmp_path):
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:50.9951690,396,109\n"
            "2023-11-16 18:15:46.6805900,374,44\n"
        )
    first, second = read_trace(path, COLUMNS)
    assert first == TracedRequest(0.0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-5)


def test_json_lines_with_custom_columns(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"t": "3", "in": 7, "q": 2}, {"t": 5.5, "in": 0, "q": 3}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read_trace(path, TraceColumns("t", "in", query="q")) == [
        TracedRequest(0, 7, 1, 2),
        TracedRequest(2.5, 1, 1, 3),
    ]


def written_prompts(folder, system_prompts):
    """A trace of twelve prompts with a system prompt and a question each, and the files of its pieces."""
    questions = range(100, 112)
    rows = [
        {"t": at, "in": 50, "pieces": {"sys_prompt": [7, system], "user_input": [question]}}
        for at, (system, question) in enumerate(zip(system_prompts, questions, strict=True))
    ]
    pieces = {"1_sys_prompt": {7: 16, 8: 5, 9: 4}, "4_user_input": dict.fromkeys(questions, 3)}
    for kind in ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search"):
        lines = [{"id": at, "token_length": tokens} for at, tokens in pieces.get(kind, {}).items()]
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    path = folder / "0_trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_the_prefix_of_a_prompt_is_its_first_pieces_that_many_prompts_share(tmp_path):
    path = written_prompts(tmp_path, [8] * MANY + [9] * (12 - MANY))
    found = read_trace(path, TraceColumns("t", "in", pieces="pieces"))
    assert [(row.prefix, row.prefix_tokens) for row in found] == [("7-8", 21)] * MANY + [("7", 16)] * 2


def test_a_piece_without_known_tokens_is_reported(tmp_path):
    path = written_prompts(tmp_path, [8] * 12)
    (tmp_path / "1_sys_prompt.jsonl").write_text('{"id": 7, "token_length": 16}', encoding="utf-8")
    with pytest.raises(BadInput, match=r"0_trace\.jsonl: pieces: not pieces .* KeyError\(8\)"):
        read_trace(path, TraceColumns("t", "in", pieces="pieces"))


def test_a_file_of_pieces_without_their_tokens_is_reported(tmp_path):
    path = written_prompts(tmp_path, [8] * 12)
    (tmp_path / "3_history.jsonl").write_text('{"id": 1, "tokens": 3}', encoding="utf-8")
    with pytest.raises(BadInput, match=r"3_history\.jsonl: should have a piece and its 'token_length'"):
        read_trace(path, TraceColumns("t", "in", pieces="pieces"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "No such file"),
        ("trace.txt", "", r"\.csv or \.jsonl"),
        ("trace.csv", "TIMESTAMP,other\n1,2\n", "no column 'ContextTokens'; it has TIMESTAMP, other"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,many,3\n", "row 1"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,inf,3\n", "row 1"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "row 1: 'nan' is not a time"),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", "1 rows"),
        ("trace.jsonl", "{", "not rows of jsonl"),
    ],
)
def test_unreadable_file_is_reported_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=message) as error:
        read_trace(path, COLUMNS)
    assert "\n" not in str(error.value)


def test_truncated_file_is_reported_in_one_line(tmp_path):
    path = tmp_path / "trace.csv.gz"
    whole = gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n2,3,4\n")
    path.write_bytes(whole[:-9])
    with pytest.raises(BadInput, match="not rows of csv"):
        read_trace(path, COLUMNS)


def read_public(name):
    file, columns = NAMED[name]
    if not (DATA / file).exists():
        pytest.skip(f"{DATA / file} is absent; TANDEM_DATA names the folder of public data")
    return read_trace(DATA / file, columns)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "seconds"),
    [
        ("azure-conversation", 19_366, 3_502),
        ("azure-code", 8_819, 3_436),
        ("ragpulse", 7_106, 604_603),
        ("ragpulse-prompts", 7_106, 604_603),
    ],
)
def test_public_traces_have_their_published_size(name, count, seconds):
    trace = read_public(name)
    assert len(trace) == count
    assert trace[-1].at == pytest.approx(seconds, rel=0.001)


@pytest.mark.data
def test_recorded_prompts_share_a_third_of_their_tokens_in_few_prefixes():
    trace = read_public("ragpulse-prompts")
    assert len({row.prefix for row in trace}) == 17
    seen, repeated = set(), 0
    for row in trace:
        repeated += row.prefix_tokens if row.prefix in seen else 0
        seen.add(row.prefix)
    assert repeated / sum(row.prompt for row in trace) == pytest.approx(0.3128, abs=1e-4)
