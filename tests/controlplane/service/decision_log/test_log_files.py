"""Segments, retention, the writer's thread and the reading of damaged logs."""

import gzip
import threading

import orjson
import pytest

from controlplane.service.decision_log.log_writer import LogWriter
from controlplane.service.decision_log.reader import find_request, read_log
from controlplane.service.decision_log.segment_files import SegmentFiles, segments


def head(segment):
    # Both versions that can be read.
    return {"row": "segment", "at": 1, "schema": 1 + segment % 2, "run": "a", "segment": segment}


def request(number, **more):
    row = {
        "row": "request", "at": number, "id": f"client-{number}", "kind": "generate", "class": "c",
        "model": "m", "tenant": "t", "prompt_tokens": 1, "sequences": 1, "outcome": "met", "decisions": [],
    }  # fmt: skip
    return row | more


def config(version):
    return {"row": "config", "at": 0, "version": version, "hash": "h", "config": {}, "machine": {}}


def files(folder, **options):
    return SegmentFiles(folder, "a", head, **{"keep_bytes": 1 << 20, **options})


def written(folder, count=6, **options):
    """A log of `count` requests in segments of two."""
    log = files(folder, segment_bytes=350, **options)
    for number in range(count):
        log.write([request(number)])
    log.close()
    return segments(folder)


def test_full_segments_are_compressed_and_each_begins_with_its_head(tmp_path):
    found = written(tmp_path)
    assert [path.name for path in found] == [f"a-00000{n}.jsonl.gz" for n in range(3)]
    for number, path in enumerate(found):
        lines = gzip.decompress(path.read_bytes()).splitlines()
        assert orjson.loads(lines[0]) == head(number)
        assert len(lines) == 3
    log = read_log(tmp_path)
    assert [row["at"] for row in log.requests] == list(range(6))
    assert (log.left_out, log.runs) == ([], {"a": 6})


def test_the_oldest_segments_are_deleted_beyond_the_limit(tmp_path):
    # Segments of at most a quarter of what is kept.
    found = written(tmp_path, 400, keep_bytes=2_000)
    assert sum(path.stat().st_size for path in found) <= 2_000
    assert found[-1].name > "a-0001"
    log = read_log(tmp_path)
    assert log.requests[-1]["at"] == 399
    assert log.left_out[0].startswith("run a: segment 0 to ")


def test_a_torn_last_line_costs_only_itself(tmp_path):
    log = files(tmp_path)
    log.write([request(0), request(1)])
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    found = read_log(tmp_path)
    assert [row["at"] for row in found.requests] == [0]
    assert "torn" in found.left_out[0]


def damaged_gzip(paths):
    paths[1].write_bytes(paths[1].read_bytes()[:-30])


def no_gzip(paths):
    paths[1].write_bytes(b"\0" * 100)


def foreign(paths):
    row = head(1) | {"schema": 99}
    paths[1].write_bytes(gzip.compress(orjson.dumps(row) + b"\n" + orjson.dumps(request(2)) + b"\n"))


def other_file(paths):
    paths[1].write_bytes(gzip.compress(b'{"prompt": "x"}\n[]\n'))


def bad_rows(paths):
    rows = [
        head(1),
        {"row": "request", "at": "soon"},
        [1],
        {"row": "unknown"},
        request(2) | {"at": True},
        request(2),
    ]
    paths[1].write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, rows)) + b"\nnot json\n"))


def missing(paths):
    paths[1].unlink()


@pytest.mark.parametrize(
    ("damage", "kept", "says"),
    [
        (damaged_gzip, {0, 1, 4, 5}, "damaged"),
        (no_gzip, {0, 1, 4, 5}, "damaged"),
        (foreign, {0, 1, 4, 5}, "schema version 99"),
        (other_file, {0, 1, 4, 5}, "no decision log"),
        (bad_rows, {0, 1, 2, 4, 5}, "5 lines"),
        (missing, {0, 1, 4, 5}, "segment 1 is missing"),
    ],
)
def test_a_damaged_log_is_read_as_far_as_it_is_good(tmp_path, damage, kept, says):
    damage(written(tmp_path))
    log = read_log(tmp_path)
    assert kept <= {row["at"] for row in log.requests} <= set(range(6))
    assert any(says in line for line in log.left_out), log.left_out


def test_a_request_is_found_by_the_clients_id_and_by_its_own(tmp_path):
    log = files(tmp_path, segment_bytes=350)
    for number in range(4):
        log.write([request(number), request(10 + number, id=f"other-{number}")])
    assert [row["id"] for row in find_request(tmp_path, "other", seconds=5)] == [
        f"other-{n}" for n in range(4)
    ]
    assert [row["at"] for row in find_request(tmp_path, "client-2", seconds=5)] == [2]
    assert find_request(tmp_path, "client-", seconds=5) == []


class SlowFiles:
    """Files whose first write waits until `is_open` is set."""

    def __init__(self):
        self.is_open, self.began = threading.Event(), threading.Event()
        self.rows = []
        self.is_closed = False

    def write(self, rows):
        self.began.set()
        assert self.is_open.wait(5)
        self.rows += rows

    def close(self):
        self.is_closed = True


def test_a_slow_disk_costs_rows_and_never_blocks():
    slow = SlowFiles()
    writer = LogWriter(slow, capacity=3)
    writer.start()
    writer.put(request(0))
    assert slow.began.wait(5)
    for number in range(1, 10):
        writer.put(request(number))
    # The rows after it are read under it.
    writer.put(config(1))
    assert writer.dropped == 6
    slow.is_open.set()
    assert writer.flush(5)
    assert [row["at"] for row in slow.rows[:-1]] == [0, 1, 2, 3]
    assert slow.rows[-1] == config(1)
    writer.put(request(10))
    writer.close()
    assert (writer.written, writer.dropped, slow.rows[-1]["at"], slow.is_closed) == (6, 6, 10, True)


class FullDisk:
    is_full = True

    def write(self, rows):
        if self.is_full:
            raise OSError(28, "No space left on device")

    def close(self):
        pass


def test_a_full_disk_is_counted_and_writing_goes_on(caplog):
    disk = FullDisk()
    writer = LogWriter(disk)
    writer.put({})
    writer.put({})
    assert (writer.written, writer.dropped, str(writer.health.fault)) == (0, 2, "os_error")
    assert caplog.text.count("No space left") == 1
    disk.is_full = False
    writer.put({})
    assert (writer.written, writer.health.fault) == (1, None)


def test_a_write_that_fails_begins_another_segment(tmp_path):
    log = files(tmp_path)
    log.write([request(0)])
    with pytest.raises(OSError, match="descriptor"):
        _fail(log)
    log.write([request(1)])
    log.close()
    assert len(segments(tmp_path)) == 2
    assert [row["at"] for row in read_log(tmp_path).requests] == [0, 1]


def _fail(log, row=None):
    import os

    os.close(log._file.fileno())
    log.write([row or request(7)])


def test_the_segment_after_a_failed_write_begins_with_the_configuration_of_the_lost_rows(tmp_path):
    log = files(tmp_path)
    log.write([config(0), request(0)])
    with pytest.raises(OSError, match="descriptor"):
        _fail(log, config(1))
    log.write([request(1)])
    log.close()
    rows = [orjson.loads(line) for line in gzip.decompress(segments(tmp_path)[-1].read_bytes()).splitlines()]
    assert rows == [head(1), config(1), request(1)]


def test_each_segment_repeats_the_configuration_that_its_rows_were_written_under(tmp_path):
    log = files(tmp_path, segment_bytes=450)
    for version in range(2):
        log.write([config(version)])
        for number in range(3):
            log.write([request(number)])
    log.close()
    found = [
        [orjson.loads(line).get("version") for line in gzip.decompress(path.read_bytes()).splitlines()]
        for path in segments(tmp_path)
    ]
    first = [versions[1] for versions in found]
    assert first == sorted(first)
    assert set(first) == {0, 1}
