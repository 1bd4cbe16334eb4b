"""Rows that a reader keeps as lines."""

import tracemalloc

import orjson
import pytest

from controlplane.service.decision_log.packed_rows import PackedRows
from controlplane.service.decision_log.reader import read_log
from controlplane.service.decision_log.segment_files import SegmentFiles

ROWS = 2_000


def row(number):
    return {
        "row": "request", "at": number, "id": f"client-{number}", "kind": "generate", "class": "c",
        "model": "m", "tenant": "11a3edb3254f", "prompt_tokens": 400 + number, "sequences": 1,
        "outcome": "met", "decisions": [{"at_ms": 0.1, "decision": "ADMIT"}], "e2e_ms": 4_954.0 + number,
        "queue_ms": 0.5, "max_output_tokens": 1_024, "blocks": [[68, 6], [23_120 + number, 19]],
        "forecast": [4, 10, 49, 1_024, 1_024], "ttft_ms": 891.5 + number, "tpot_ms": 50.5,
        "output_tokens": 81, "cached_tokens": 96,
    }  # fmt: skip


def test_a_log_takes_little_more_memory_than_its_lines(tmp_path):
    head = {"row": "segment", "at": 0, "schema": 2, "run": "a", "segment": 0}
    files = SegmentFiles(tmp_path, "a", lambda number: head, keep_bytes=1 << 30)
    rows = [row(number) for number in range(ROWS)]
    files.write(rows)
    files.close()
    lines = sum(len(orjson.dumps(each)) for each in rows)
    tracemalloc.start()
    log = read_log(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(log.requests) == [{**each, "run": "a"} for each in rows]
    # Parsed, rows take five times as much.
    assert peak < 1.5 * lines + 100_000


def test_rows_are_chosen_in_an_order_and_a_change_is_of_one_reading():
    rows = PackedRows()
    for number in range(4):
        rows.append(b'{"at": %d } \n' % number, "b-1")
    chosen = rows.chosen([3, 1])
    assert list(chosen) == [{"at": 3, "run": "b-1"}, {"at": 1, "run": "b-1"}]
    assert [each["at"] for each in rows[1:3]] == [1, 2]
    chosen[0]["at"] = 7
    assert (chosen[0]["at"], len(chosen), bool(PackedRows())) == (3, 2, False)
    with pytest.raises(IndexError):
        rows[4]
