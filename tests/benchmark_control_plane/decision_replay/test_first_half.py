"""The first half of a log, of which the command may need few requests."""

from controlplane.service.decision_log.packed_rows import PackedRows
from tests.benchmark_control_plane.tuning.synthetic_blocks import traffic


class UnreadRows(PackedRows):
    """Rows that may be read at some positions, but not from the first to the last."""

    def __iter__(self):
        raise AssertionError("all rows are read")


def test_the_first_half_is_found_and_cut_without_reading_all_rows():
    rows = UnreadRows(b'{"at":%d}' % (number * number) for number in range(1_001))
    half = traffic(rows).first_half
    # Half of the time from 0 to 1,000,000.
    assert [row["at"] for row in half] == [number * number for number in range(708)]
    assert isinstance(half, PackedRows)
    assert [row["at"] for row in half[:3]] == [0, 1, 4]
