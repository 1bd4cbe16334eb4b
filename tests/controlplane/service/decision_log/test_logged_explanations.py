"""`tandem explain` prints requests of the decision log like those that the server remembers."""

from controlplane.commands.request_explanation import _print_request
from controlplane.service.decision_log.log_rows import logged_history
from controlplane.service.decision_log.reader import find_request
from controlplane.service.decision_log.segment_files import SegmentFiles
from tests.controlplane.service.decision_log.test_log_files import config, head, request


def log_of(folder, rows):
    files = SegmentFiles(folder, "a", head, keep_bytes=1 << 20)
    files.write(rows)
    files.close()


def explained(folder, name, capsys):
    for row, section in find_request(folder, name, seconds=5):
        _print_request(logged_history(row, section))
    return capsys.readouterr().out


def under(version, at, ttft_ms):
    classes = {"c": {"ttft_ms": ttft_ms, "priority": 3}}
    return config(version) | {"at": at, "config": {"classes": classes}}


def test_a_logged_request_is_printed_with_the_objectives_of_its_arrival(tmp_path, capsys):
    preempted = {"at_ms": 3.0, "decision": "PREEMPTED", "by": "gate", "for": "urgent-9"}
    rows = [
        under(0, 0, 500.0), under(1, 50, 900.0),
        request(10, decisions=[{"at_ms": 0.1, "decision": "ADMIT"}, preempted], slo_ms={"tpot": 40.0}),
        request(60),
    ]  # fmt: skip
    log_of(tmp_path, rows)
    first, second = (explained(tmp_path, f"client-{number}", capsys) for number in (10, 60))
    assert first.startswith("client-10: met\n  generate, class c, tenant t, model m; 1 prompt tokens")
    assert "objectives: ttft 500 ms, tpot 40 ms" in first
    assert "PREEMPTED by the gate for urgent-9\n" in first and "compute again" not in first
    assert "objectives: ttft 900 ms\n" in second


def test_a_logged_request_without_a_configuration_has_no_objectives(tmp_path, capsys):
    log_of(tmp_path, [request(1)])
    assert "objectives: none" in explained(tmp_path, "client-1", capsys)
