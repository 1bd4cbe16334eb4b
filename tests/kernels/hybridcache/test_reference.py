"""The reference operations decode like plain attention, and the block layout holds rows as specified."""

from dataclasses import replace

import pytest
import torch
from hybridcache import decode, ops
from hybridcache.layout import BlockLayout, HeldTokens, Projection

from tests.kernels.hybridcache.cases import a_case

# An empty request, one row, just below, at and above a block of 16 rows, several blocks.
RAGGED = [0, 1, 15, 16, 17, 50]

SHAPES = {
    "opt": {},
    "llama": {"rotated": 32, "bias": False},
    "phi": {"rotated": 12},
    "wide-heads": {"heads": 4, "head_dim": 48, "hidden_size": 128, "rotated": 48},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", [decode.restored, decode.value_absorbed])
def test_restoring_decodes_as_plain_attention(shape, way):
    case = a_case(RAGGED, **shape)
    found = way(case.query, case.hidden, case.held, case.projection, case.rotary, case.scale)
    for own, (_, _, expected) in zip(found, case.plain(), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_absorbing_decodes_as_plain_attention(bias):
    case = a_case(RAGGED, bias=bias)
    found = decode.absorbed(case.query, case.hidden, case.held, case.projection, case.scale)
    for own, (_, _, expected) in zip(found, case.plain(), strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_absorbing_in_16_bits_is_about_as_exact_as_keys_and_values(dtype):
    case = a_case([300, 500], heads=8, head_dim=64, dtype=dtype)
    exact = replace(
        case,
        rows=[rows.float() for rows in case.rows],
        projection=Projection(*(part.float() for part in case.projection)),
        query=case.query.float(),
    )
    truth, plain = (torch.stack([found for *_, found in one.plain()]) for one in (exact, case))
    absorbed = decode.absorbed(case.query, case.hidden, case.held, case.projection, case.scale)
    errors = [(found.to(dtype).float() - truth).square().mean().sqrt() for found in (absorbed, plain)]
    assert 0 < errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_restored_tokens_may_overwrite_their_rows(shape):
    case = a_case(RAGGED, **shape)
    restored = [
        decode.restored_tokens(case.hidden, _only(case, at), case.projection, case.rotary, heads=4)
        for at in range(len(RAGGED))
    ]
    case.blocks.zero_()
    for (keys, values), (key, value, _) in zip(restored, case.plain(), strict=True):
        torch.testing.assert_close(keys, key, atol=1e-5, rtol=0)
        torch.testing.assert_close(values, value, atol=1e-5, rtol=0)


def _only(case, at):
    own = slice(at, at + 1)
    return HeldTokens(case.held.tables[own], case.held.lengths[own], RAGGED[at])


def test_rows_of_negative_slots_are_dropped():
    hidden = torch.zeros(2, 4, 3)
    ops.scatter_rows(torch.ones(3, 3), torch.tensor([-1, 5, -1]), hidden)
    assert hidden.sum(-1).tolist() == [[0, 0, 0, 0], [0, 3, 0, 0]]


def test_hidden_rows_are_the_same_memory():
    layout = BlockLayout(block_tokens=4, kv_heads=2, head_dim=8, hidden_size=16)
    blocks = torch.zeros(3, 2, 4, 16)
    layout.hidden_rows(blocks)[1] = 1.0
    assert layout.rows_per_block == 8
    assert blocks.sum((1, 2, 3)).tolist() == [0, 128, 0]


def test_hidden_rows_fit_blocks_of_either_memory_order():
    """FlashAttention's cache has tokens before heads, the CPU's heads before tokens."""
    layout = BlockLayout(block_tokens=4, kv_heads=2, head_dim=8, hidden_size=16)
    turned = torch.zeros(3, 4, 2, 16).transpose(1, 2)
    layout.hidden_rows(turned)[1, 7] = 1.0
    assert turned.sum((2, 3)).tolist() == [[0, 0], [0, 16], [0, 0]]


def test_blocks_with_gaps_are_refused():
    layout = BlockLayout(block_tokens=4, kv_heads=2, head_dim=8, hidden_size=16)
    with pytest.raises(ValueError, match="128 elements without gaps"):
        layout.hidden_rows(torch.zeros(2, 3, 4, 16).transpose(0, 1))


@pytest.mark.parametrize("layout", [BlockLayout(16, 40, 128, 5120), BlockLayout(16, 32, 80, 2560)])
def test_own_keys_per_head_halve_the_memory(layout):
    assert layout.rows_per_block == 32
