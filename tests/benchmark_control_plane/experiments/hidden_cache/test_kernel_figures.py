import pytest

from benchmark_control_plane.experiments.hidden_cache.kernel_figures import problems

ROW = {"registers": 80, "spilled_bytes": 0, "shared_bytes": 1024, "warps": 4}


def _figures(triton="3.9.0", **changes):
    return {"triton": triton, "kernels": {"sm_90": {"OPT-13B": {"mix_rows": ROW | changes}}}}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (_figures(), []),
        (_figures(registers=96), ["sm_90 OPT-13B mix_rows: .*96.*, kept are .*80"]),
        # Another compiler counts otherwise, but may not spill either.
        (_figures("3.10.0", registers=96), []),
        (_figures("3.10.0", spilled_bytes=8), ["8 bytes spilled"]),
        (_figures(spilled_bytes=8), ["8 bytes spilled", "kept are"]),
    ],
)
def test_what_spills_or_changed_is_told(found, told):
    given = list(problems(found, _figures()))
    assert len(given) == len(told)
    for one, pattern in zip(given, told, strict=True):
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(one)
