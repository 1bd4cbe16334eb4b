"""The last preemptions that the scheduler publishes."""

from types import SimpleNamespace

from backends.vllm.plugin.preemption_log import KEPT, ROW_SIZE, PreemptionLog, PreemptionRow, unpacked


def request(key: int, computed: int = 9, cached: int = 2) -> SimpleNamespace:
    return SimpleNamespace(num_computed_tokens=computed, tandem=SimpleNamespace(key=key, cached=cached))


def test_a_beneficiary_is_that_of_the_next_preemption_only():
    log = PreemptionLog()
    log.beneficiary = SimpleNamespace(key=1 << 63)
    log.add(request(7), 5)
    log.add(request(8, computed=1), 6)
    assert list(unpacked(log.packed)) == [PreemptionRow(5, 7, 1 << 63, 7), PreemptionRow(6, 8, 0, 0)]
    assert (log.count, log.tokens) == (2, 7)


def test_all_are_counted_and_the_last_are_kept():
    log = PreemptionLog()
    for number in range(KEPT + 3):
        log.add(request(number), number)
    assert (log.count, len(log.packed)) == (KEPT + 3, KEPT * ROW_SIZE)
    assert [row.victim for row in unpacked(log.packed)] == list(range(3, KEPT + 3))
