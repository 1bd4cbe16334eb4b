"""Calibration measures each form and separates the costs per token, request and step."""

import pytest
import torch
from hybridcache.calibration import (
    CalibrationSetup,
    Cost,
    copy_bandwidth,
    cost_differences,
    decode_variants,
    measure,
)
from hybridcache.layout import BlockLayout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _setup(device="cpu", *, rotary=False, contexts=(3, 17), dtype=torch.float32):
    layout = BlockLayout(block_tokens=8, kv_heads=4, head_dim=32, hidden_size=128)
    return CalibrationSetup(layout, dtype, torch.device(device), 2, contexts, repeats=1, rotary=rotary)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [False, True])
def test_all_timed_variants_give_the_same_output(device, rotary):
    variants = decode_variants(_setup(device, rotary=rotary))
    expected = variants["m0"](17)
    for name in set(variants) - {"kv"}:
        torch.testing.assert_close(variants[name](17), expected, atol=1e-4, rtol=0, msg=name)


def test_the_cost_per_step_follows_from_two_batch_sizes():
    # Keys and values, hidden states: 1 and 3 s per token, 10 and 14 s per request; 100 s per step with hidden
    # states.
    few, many = (Cost(3.0, 14.0 + 100.0 / count, ()) for count in (2, 8))
    assert cost_differences(2, few, 8, many, Cost(1.0, 10.0, ())) == pytest.approx((2.0, 4.0, 100.0))


def test_only_the_requested_forms_are_timed():
    assert set(measure(_setup(), ["kv", "m1"])) == {"kv", "m1"}


def test_absorption_is_not_timed_for_rotary_models():
    assert set(measure(_setup(rotary=True))) == {"kv", "m0", "m1"}
    assert set(measure(_setup())) == {"kv", "m0", "m1", "m2"}


def test_the_line_passes_through_two_contexts():
    for cost in measure(_setup()).values():
        for context, seconds in zip((3, 17), cost.seconds, strict=True):
            line = cost.seconds_per_request + cost.seconds_per_token * context
            assert line * 2 == pytest.approx(seconds)


@pytest.mark.gpu
def test_absorption_meets_its_performance_target_on_the_device():
    """At OPT-13B's shapes: at most 1.2 times the time of keys and values, and 60 % of a copy's bandwidth."""
    layout = BlockLayout(block_tokens=16, kv_heads=40, head_dim=128, hidden_size=5120)
    device = torch.device("cuda")
    contexts = (512, 1024, 1536, 2048)
    many = CalibrationSetup(
        layout, torch.bfloat16, device, 32, contexts, 20, rotary=False, flushed_bytes=2 << 30
    )
    cost = measure(many, ["kv", "m2"])
    assert cost["m2"].seconds[-1] <= 1.2 * cost["kv"].seconds[-1]
    moved = 2 * layout.hidden_size * 2 / cost["m2"].seconds_per_token
    assert moved >= 0.6 * copy_bandwidth(device, megabytes=1024, repeats=20)
