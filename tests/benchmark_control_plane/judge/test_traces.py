import gzip
import json
import os
from pathlib import Path

import pytest

from benchmark_control_plane.common.command_line import BadInput
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
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_trace(path, TraceColumns("t", "in", query="q")) == [
        TracedRequest(0, 7, 1, 2),
        TracedRequest(2.5, 1, 1, 3),
    ]


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


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "seconds"),
    [("azure-conversation", 19_366, 3_502), ("azure-code", 8_819, 3_436), ("ragpulse", 7_106, 604_603)],
)
def test_public_traces_have_their_published_size(name, count, seconds):
    file, columns = NAMED[name]
    if not (DATA / file).exists():
        pytest.skip(f"{DATA / file} is absent; TANDEM_DATA names the folder of public data")
    trace = read_trace(DATA / file, columns)
    assert len(trace) == count
    assert trace[-1].at == pytest.approx(seconds, rel=0.001)
