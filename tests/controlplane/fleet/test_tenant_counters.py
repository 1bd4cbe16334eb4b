"""Token counters of tenants over several boxes, processes and late reports."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.tenant_counters import TenantCounters


def test_differences_between_reports_are_added_over_boxes() -> None:
    counters = TenantCounters({"b": 2.0})
    counters.set_active(["a", "b"])
    assert counters.heard("box-0", "e", {"a": 100, "b": 50}) == {"a": 100, "b": 50}
    assert counters.heard("box-1", "e", {"a": 30}) == {"a": 30}
    assert counters.heard("box-0", "e", {"a": 150, "b": 50}) == {"a": 50}
    assert counters.lead("a") == 180 - 25
    assert counters.lead("b") == 0


def test_a_new_process_counts_from_zero_and_a_late_report_adds_nothing() -> None:
    counters = TenantCounters()
    counters.heard("box-0", "e", {"a": 100})
    assert counters.heard("box-0", "e", {"a": 60}) == {}
    assert counters.heard("box-0", "f", {"a": 60}) == {"a": 60}


def test_a_box_that_was_silent_is_not_counted_twice_when_it_comes_back() -> None:
    """A router drops a box that does not answer, and takes the same process again when it does."""
    counters = TenantCounters()
    counters.heard("box-0", "e", {"a": 100})
    counters.forget("box-0")
    assert counters.heard("box-0", "e", {"a": 130}) == {"a": 30}


def test_the_totals_of_boxes_that_left_for_ever_are_dropped() -> None:
    counters = TenantCounters()
    for box in range(1_100):
        counters.heard(f"box-{box}", "e", {"a": 1})
        counters.forget(f"box-{box}")
        counters.forget("never-heard")
    assert len(counters._totals) == len(counters._left) == 1_000


def test_idle_time_earns_no_credit() -> None:
    counters = TenantCounters()
    counters.set_active(["a"])
    counters.heard("box-0", "e", {"a": 1_000})
    counters.set_active(["a", "new"])
    assert counters.lead("a") == 0
    counters.heard("box-0", "e", {"a": 1_400, "new": 100})
    assert counters.lead("a") == 300


totals = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 50)), max_size=20)


@given(totals, st.data())
def test_lost_and_repeated_reports_lose_and_add_nothing(
    steps: list[dict[str, int]], data: st.DataObject
) -> None:
    served: dict[str, int] = {}
    counters, added = TenantCounters(), dict.fromkeys("abc", 0)
    for step in steps:
        for tenant, tokens in step.items():
            served[tenant] = served.get(tenant, 0) + tokens
        for _ in range(data.draw(st.integers(0, 2))):
            for tenant, tokens in counters.heard("box-0", "e", served).items():
                added[tenant] += tokens
    for tenant, tokens in counters.heard("box-0", "e", served).items():
        added[tenant] += tokens
    assert added == {tenant: served.get(tenant, 0) for tenant in "abc"}
