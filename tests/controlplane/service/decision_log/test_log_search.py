"""A search of the log for one id ends, however many requests have it."""

from controlplane.service.decision_log.reader import find_request
from tests.controlplane.service.decision_log.test_log_files import files, request


def test_a_search_ends_once_it_has_found_many(tmp_path, monkeypatch):
    monkeypatch.setattr("controlplane.service.decision_log.reader._MOST_FOUND", 3)
    log = files(tmp_path, segment_bytes=350)
    for number in range(9):
        log.write([request(number, id=f"one-{number}")])
    assert [row["at"] for row, _ in find_request(tmp_path, "one", seconds=5)] == [6, 7, 8]
