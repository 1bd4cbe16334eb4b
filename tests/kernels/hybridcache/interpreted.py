"""Compares every Triton kernel with its reference, compiled on a GPU, otherwise in the interpreter.

`test_interpreted` runs this file in a process of its own, because Triton reads TRITON_INTERPRET on import.
The interpreter computes wrong products of bfloat16, so that dtype is tested on GPUs only.
"""

import pytest
import torch
from hybridcache import launch, reference
from hybridcache.layout import HeldTokens

from tests.kernels.hybridcache import cases

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RAGGED = [0, 1, 15, 16, 17, 70]
SHAPES = {
    "opt": {},
    "llama": {"rotated": 32, "bias": False},
    "phi": {"rotated": 12, "head_dim": 24, "heads": 3},
    "half": {"rotated": 32, "dtype": torch.float16},
}
if DEVICE == "cuda":
    SHAPES["bfloat"] = {"rotated": 32, "dtype": torch.bfloat16}
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 0},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 4e-2, "rtol": 4e-2},
}


def a_case(lengths, **shape):
    return cases.a_case(lengths, device=DEVICE, **shape)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def case(request):
    return a_case(RAGGED, **request.param)


@pytest.fixture(params=[1, 264], ids=["whole", "split"])
def splitting(request, monkeypatch):
    monkeypatch.setattr(launch, "_PROGRAMS", request.param)


def _agree(found, expected, dtype):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_scatter():
    case = a_case([9], heads=3, head_dim=24)
    rows = torch.randn(4, 72, device=DEVICE)
    slots = torch.tensor([3, -1, 0, 2 * case.layout.rows_per_block + 1], device=DEVICE)
    expected = case.blocks.clone()
    reference.scatter_rows(rows, slots, case.layout.hidden_rows(expected))
    launch.scatter_rows(rows, slots, case.hidden)
    _agree(case.blocks.contiguous(), expected, rows.dtype)


def test_gather(case):
    total = sum(RAGGED)
    starts = torch.tensor([0, *RAGGED[:-1]], device=DEVICE).cumsum(0, dtype=torch.int32)
    found = case.hidden.new_zeros(total, case.layout.hidden_size)
    launch.gather_rows(case.hidden, case.held, starts, found)
    assert torch.equal(found, torch.cat(case.rows))


def test_restore(case):
    tokens = 4
    blocks = -(-max(RAGGED) // tokens)
    tables = torch.randperm(len(RAGGED) * blocks, device=DEVICE).to(torch.int32).view(len(RAGGED), blocks)
    shape = (2, len(RAGGED) * blocks, tokens, case.layout.kv_heads, case.layout.head_dim)
    found, expected = case.query.new_zeros(shape), case.query.new_zeros(shape)
    held = (case.hidden, case.held, case.projection, case.rotary)
    reference.restore(*held, *expected, tables)
    launch.restore(*held, *found, tables)
    _agree(found, expected, case.query.dtype)


def test_paged_decode(case, splitting):
    keys, values = case.keys_and_values()
    # The same blocks, read as keys and values, hold half as many tokens.
    held = HeldTokens(case.held.tables, case.held.lengths // 2, case.held.longest // 2)
    found = launch.paged_decode(case.query, keys, values, held, case.scale)
    _agree(found, reference.paged_decode(case.query, keys, values, held, case.scale), case.query.dtype)


def test_rotated_scores(case):
    asked = (case.query, case.hidden, case.held, case.projection, case.rotary, case.scale)
    _agree(launch.rotated_scores(*asked), reference.rotated_scores(*asked), case.query.dtype)


def test_hidden_scores(case):
    shape = (case.layout.kv_heads, len(RAGGED), case.layout.hidden_size)
    # In the memory order of a batched matrix product: heads outermost.
    absorbed = torch.randn(shape, device=DEVICE).mul(0.1).to(case.query.dtype).transpose(0, 1)
    found = launch.hidden_scores(absorbed, case.hidden, case.held)
    _agree(found, reference.hidden_scores(absorbed, case.hidden, case.held), case.query.dtype)


def test_mix_rows(case, splitting):
    shape = (len(RAGGED), case.layout.kv_heads, max(RAGGED))
    weights = torch.rand(shape, device=DEVICE).softmax(-1).to(case.query.dtype)
    found = launch.mix_rows(weights, case.hidden, case.held)
    _agree(found, reference.mix_rows(weights, case.hidden, case.held), case.query.dtype)


def test_requests_without_tokens():
    case = a_case([0, 0])
    absorbed = torch.zeros(2, 4, 128, device=DEVICE)
    assert launch.hidden_scores(absorbed, case.hidden, case.held).shape == (2, 4, 0)
    assert launch.mix_rows(torch.zeros(2, 4, 0, device=DEVICE), case.hidden, case.held).eq(0).all()
    keys, values = case.keys_and_values()
    assert launch.paged_decode(case.query, keys, values, case.held, 1.0).eq(0).all()
