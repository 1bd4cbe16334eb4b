from controlplane.core.clock import Instant, after, seconds, to_seconds
from controlplane.service.gate.rate_limits import RateLimiter, TenantLimits

START = Instant(seconds(100))


def at(elapsed: float) -> Instant:
    return after(START, seconds(elapsed))


def test_a_tenant_without_limits_never_waits():
    rates = RateLimiter({"free": TenantLimits()})
    assert all(rates.try_charge("free", START, 10**9) is None for _ in range(1_000))
    assert rates.try_charge("unknown", START, 1) is None


def test_requests_refill_continuously():
    rates = RateLimiter({"t": TenantLimits(requests_per_minute=2)})
    assert rates.try_charge("t", START, 1) is None
    assert rates.try_charge("t", START, 1) is None
    wait_time = rates.try_charge("t", START, 1)
    assert wait_time is not None and to_seconds(wait_time) == 30
    assert rates.try_charge("t", at(29), 1) is not None
    assert rates.try_charge("t", at(30), 1) is None


def test_output_tokens_cause_a_debt_that_delays_the_next_request():
    rates = RateLimiter({"t": TenantLimits(tokens_per_minute=60)})
    assert rates.try_charge("t", START, 10) is None
    rates.charge_output("t", START, 110)
    wait_time = rates.try_charge("t", START, 10)
    assert wait_time is not None and to_seconds(wait_time) == 70
    assert rates.try_charge("t", at(70), 10) is None


def test_a_request_above_the_whole_minute_waits_for_a_full_bucket_only():
    rates = RateLimiter({"t": TenantLimits(tokens_per_minute=60)})
    assert rates.try_charge("t", START, 600) is None
    wait_time = rates.try_charge("t", START, 600)
    assert wait_time is not None and to_seconds(wait_time) == 600


def test_a_lower_bound_is_replaced_by_the_tokens_of_the_request():
    rates = RateLimiter({"t": TenantLimits(requests_per_minute=9, tokens_per_minute=60)})
    assert rates.try_charge("t", START, 10) is None
    assert rates.correct("t", START, 10, 40) is None
    assert rates.try_charge("t", START, 10) is None
    wait_time = rates.correct("t", START, 10, 25)
    assert wait_time is not None and to_seconds(wait_time) == 5
    assert rates.try_charge("t", START, 10) is None, "the refused request is charged its lower bound only"
    assert rates.correct("t", START, 10, 4) is None
    assert rates.try_charge("t", START, 6) is None
    assert rates.correct("unknown", START, 1, 10**9) is None


def test_a_corrected_request_above_the_whole_minute_needs_a_full_bucket_only():
    rates = RateLimiter({"t": TenantLimits(tokens_per_minute=60)})
    assert rates.try_charge("t", START, 30) is None
    assert rates.correct("t", START, 30, 600) is None


def test_a_refusal_by_one_limit_does_not_charge_the_other():
    rates = RateLimiter({"t": TenantLimits(requests_per_minute=1, tokens_per_minute=60)})
    assert rates.try_charge("t", START, 10) is None
    for _ in range(5):
        wait_time = rates.try_charge("t", START, 10)
        assert wait_time is not None and to_seconds(wait_time) == 60
    assert rates.try_charge("t", at(60), 60) is None
    wait_time = rates.try_charge("t", at(60), 30)
    assert wait_time is not None and to_seconds(wait_time) == 60, "the later of the two"


def test_changed_limits_keep_the_level_and_the_debt():
    rates = RateLimiter(
        {"t": TenantLimits(tokens_per_minute=60), "gone": TenantLimits(requests_per_minute=1)}
    )
    assert rates.try_charge("t", START, 50) is None
    assert rates.try_charge("gone", START, 1) is None
    limits = {"t": TenantLimits(tokens_per_minute=600), "new": TenantLimits(requests_per_minute=1)}
    rates.set_limits(limits)
    wait_time = rates.try_charge("t", START, 20)
    assert wait_time is not None and to_seconds(wait_time) == 1
    assert rates.try_charge("gone", START, 1) is None
    assert rates.try_charge("new", START, 1) is None and rates.try_charge("new", START, 1) is not None
    rates.charge_output("t", START, 70)
    rates.set_limits({"t": TenantLimits(tokens_per_minute=6)})
    wait_time = rates.try_charge("t", START, 6)
    assert wait_time is not None and to_seconds(wait_time) == 660


def test_a_lower_limit_lowers_a_full_bucket():
    rates = RateLimiter({"t": TenantLimits(requests_per_minute=100)})
    rates.set_limits({"t": TenantLimits(requests_per_minute=1)})
    assert rates.try_charge("t", START, 1) is None
    assert rates.try_charge("t", START, 1) is not None
