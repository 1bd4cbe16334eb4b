"""The queries of docs/decision-log.md run on a log, compressed or not."""

import gzip
import re
from pathlib import Path

import duckdb
import pytest

from controlplane.service.decision_log.reader import read_log
from controlplane.service.decision_log.segment_files import segments
from tests.controlplane.service.decision_log.test_decision_log import logged

PAGE = Path(__file__).parents[4] / "docs" / "decision-log.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("log")
    logged(path, keep="400KB")
    # As a crash leaves it.
    last = segments(path)[-1]
    last.with_suffix("").write_bytes(gzip.decompress(last.read_bytes()))
    last.unlink()
    return path


def test_each_query_answers(folder):
    requests = read_log(folder).requests
    queries = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(queries) == 3
    attainment, reasons, hits = (duckdb.sql(text.replace("LOG", str(folder))).fetchall() for text in queries)
    assert sum(row[2] for row in attainment) == len(requests)
    decided = [
        each for row in requests for each in row["decisions"] if each["decision"] in ("DEFER", "REJECT")
    ]
    assert sum(row[3] for row in reasons) == len(decided) > 0
    assert any(row[4] is not None for row in reasons)
    assert sum(row[2] for row in hits) == sum("ttft_ms" in row for row in requests)
    assert max(row[3] for row in hits) > 0
