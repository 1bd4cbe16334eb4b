"""Segments, retention, the writer's thread and the reading of damaged logs."""

import gzip
import os
import threading

import orjson
import pytest

from controlplane.service.decision_log.log_rows import logged_id
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
    assert log.left_out == []


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
    assert [row["id"] for row, _ in find_request(tmp_path, "other", seconds=5)] == [
        f"other-{n}" for n in range(4)
    ]
    assert [row["at"] for row, _ in find_request(tmp_path, "client-2", seconds=5)] == [2]
    assert find_request(tmp_path, "client-", seconds=5) == []


UUID = "3f0e8a64-5b1c-4d2e-9a7f-0123456789ab"


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        (UUID, "3f0e8a64-5b1c-4d2e"),
        (f"{UUID}-17", "3f0e8a64-5b1c-4d2e-17"),
        (f"req_{UUID.upper()}:{UUID}-1", "req_3F0E8A64-5B1C-4D2E:3f0e8a64-5b1c-4d2e-1"),
        # Of these the first half does not tell one from another.
        ("01932c07-209c-7e5b-9a7f-0123456789ab-1", None),
        ("c232ab00-9414-11ec-b3c8-9f6bdeced846-1", None),
        ("4bf92f3577b34da6a3ce929d0e0e4736-1", None),
        (f"{UUID}0-1", None),
    ],
)
def test_a_random_uuid_is_logged_in_part(given, logged):
    assert logged_id(given) == (logged or given)


@pytest.mark.parametrize("written", [logged_id, str])
@pytest.mark.parametrize("around", ["{}", "run-{}", "{}-1", "a:{}:b-2"])
def test_a_request_is_found_by_a_uuid_however_it_was_written(tmp_path, written, around):
    client = around.format(UUID)
    other = client.replace("3f0e8a64", "3f0e8a65")
    log = files(tmp_path)
    log.write([request(n, id=written(f"{each}-{n}")) for n, each in enumerate([client, other, client])])
    log.close()

    def found(name):
        return [row["at"] for row, _ in find_request(tmp_path, name, seconds=5)]

    assert found(client) == [0, 2]
    assert found(f"{client}-2") == [2]
    # As the log shows it.
    assert found(f"{written(client)}-2") == [2]
    assert found(f"{other}-2") == []


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


class RowCounts:
    """Files that note how many rows each write has."""

    def __init__(self):
        self.counts = []

    def write(self, rows):
        self.counts.append(len(rows))

    def close(self):
        pass


def test_rows_are_gathered_until_someone_waits_for_them():
    files = RowCounts()
    writer = LogWriter(files, gather_seconds=600)
    writer.start()
    for number in range(3):
        writer.put(request(number))
    assert writer.flush(5)
    assert files.counts == [3]
    writer.put(request(3))
    writer.close()
    assert (files.counts, writer.written) == ([3, 1], 4)


def fail_to_compress(monkeypatch):
    def full(plain, target):
        target.write_bytes(b"part")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("controlplane.service.decision_log.segment_files._compress", full)


def test_rows_of_a_segment_that_cannot_be_compressed_count_as_written(tmp_path, monkeypatch):
    fail_to_compress(monkeypatch)
    writer = LogWriter(files(tmp_path, segment_bytes=350))
    for number in range(4):
        writer.put(request(number))
    assert (writer.written, writer.dropped) == (4, 0)
    assert "No space left" in writer.health.text()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    assert [row["at"] for row in read_log(tmp_path).requests] == list(range(4))


class NoSpace:
    """A file on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_full_disk_gets_no_file_for_each_row(tmp_path, monkeypatch):
    log, opened = files(tmp_path), type(tmp_path).open
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda *given: opened(*given).close() or NoSpace())
        for number in range(3):
            with pytest.raises(OSError, match="No space left"):
                log.write([request(number)])
    assert list(tmp_path.iterdir()) == []
    log.write([request(3)])
    found = read_log(tmp_path)
    assert ([row["at"] for row in found.requests], found.left_out) == ([3], [])


def test_of_several_runs_the_file_that_was_written_first_is_deleted_first(tmp_path):
    for number, name in enumerate(
        ["b-000000.jsonl.gz", "b-000001.jsonl.gz", "b-000002.part", "z-000000.jsonl"]
    ):
        (tmp_path / name).write_bytes(b"0" * 900)
        os.utime(tmp_path / name, (number, number))
    # The names of run `a` sort before those of the others.
    log = files(tmp_path, keep_bytes=2_000)
    log.write([request(0)])
    assert {path.name for path in tmp_path.iterdir()} == {"a-000000.jsonl", "z-000000.jsonl"}


def test_a_segment_in_both_forms_is_read_once(tmp_path):
    # As a crash between compression and deletion leaves it, or a listing during a compression sees it.
    found = written(tmp_path)
    plain = tmp_path / found[1].name.removesuffix(".gz")
    plain.write_bytes(gzip.decompress(found[1].read_bytes()))
    assert segments(tmp_path) == found
    log = read_log(tmp_path)
    assert [row["at"] for row in log.requests] == list(range(6))
    assert log.left_out == []


def test_a_segment_deleted_while_the_log_is_read_is_left_out(tmp_path, monkeypatch):
    listed = written(tmp_path)
    listed[1].unlink()
    monkeypatch.setattr("controlplane.service.decision_log.reader.segments", lambda folder: listed)
    log = read_log(tmp_path)
    assert {0, 1, 4, 5} == {row["at"] for row in log.requests}
    assert f"{listed[1].name}: deleted since the folder was listed" in log.left_out
    assert find_request(tmp_path, "client-0", seconds=5)


def test_a_segment_may_be_named_by_its_plain_form_and_a_missing_file_is_an_error(tmp_path):
    found = written(tmp_path)
    assert [row["at"] for row in read_log(found[0].with_suffix("")).requests] == [0, 1]
    with pytest.raises(FileNotFoundError, match="none"):
        read_log(tmp_path / "none.jsonl")


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


def test_rows_that_two_threads_drop_at_once_are_all_counted():
    """The event loop may drop one while the thread adds those that the disk did not take."""
    writer = LogWriter(FullDisk(), capacity=0)
    writer.start()

    class Interrupted(list):
        def __len__(self):
            writer.put(request(0))
            return super().__len__()

    writer._write(Interrupted([{}] * 3))
    assert writer.dropped == 4
    writer.close()


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
