"""The check of compiled kernels reports spills and changes."""

import pytest

from benchmark_control_plane.experiments.hidden_cache.kernel_figures import problems

ROW = {"registers": 80, "spilled_bytes": 0, "shared_bytes": 1024, "warps": 4}


def _figures(triton="3.9.0", **changes):
    return {"triton": triton, "kernels": {"sm_90": {"OPT-13B": {"mix_rows": ROW | changes}}}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (_figures(), []),
        (_figures(registers=96), ["sm_90 OPT-13B mix_rows: .*96.*, committed are .*80"]),
        # Another compiler may count differently, but must not spill.
        (_figures("3.10.0", registers=96), []),
        (_figures("3.10.0", spilled_bytes=8), ["8 bytes spilled"]),
        (_figures(spilled_bytes=8), ["8 bytes spilled", "committed are"]),
    ],
)
def test_spills_and_changes_are_reported(found, expected):
    given = list(problems(found, _figures()))
    assert len(given) == len(expected)
    for complaint, pattern in zip(given, expected, strict=True):
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(complaint)
