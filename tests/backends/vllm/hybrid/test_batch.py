"""A step is split by form: vLLM's metadata keeps the plain requests, ours describes the others."""

import numpy as np
import pytest
import torch
from hybridcache.layout import BlockLayout

# No engine runs, but importing vLLM takes as long.
pytestmark = [pytest.mark.engine, pytest.mark.untimed]

LAYOUT = BlockLayout(block_tokens=4, kv_heads=2, head_dim=8, hidden_size=16)
# Per request: total tokens, tokens of this step, blocks.
LENGTHS, QUERIES = [9, 11, 6, 2], [1, 1, 6, 2]
TABLES = torch.tensor([[3, 5, 7], [4, 6, 0], [8, 9, 0], [2, 0, 0]], dtype=torch.int32)
HIDDEN = frozenset({4, 8})


def _a_step(forms):
    """Metadata as from vLLM's GPU model runner, partly on the host."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from backends.vllm.hybrid.batch import _SplitStep

    starts = torch.tensor([0, *QUERIES]).cumsum(0, dtype=torch.int32)
    places = [place for size, new in zip(LENGTHS, QUERIES, strict=True) for place in range(size - new, size)]
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        num_reqs=4, num_actual_tokens=len(places), max_query_len=6, max_seq_len=11, block_table_tensor=TABLES,
        slot_mapping=torch.tensor(places), positions=torch.tensor(places),
        is_prefilling=torch.tensor([False, False, True, True]), req_idx=np.array([7, 5, 3, 1]),
        seq_lens_cpu_upper_bound=torch.tensor(LENGTHS),
    )  # fmt: skip
    return _SplitStep(common, forms, LAYOUT)


def test_vllms_metadata_has_only_the_plain_requests():
    from backends.vllm.hybrid.step_forms import StepForms

    found = _a_step(StepForms(hidden=HIDDEN)).plain_metadata()
    assert found.num_reqs == 2
    assert found.num_actual_tokens == found.query_start_loc_cpu[-1] == 3
    assert found.query_start_loc.tolist() == [0, 1, 3]
    assert (found.max_query_len, found.max_seq_len) == (2, 9)
    assert found.seq_lens.tolist() == found.seq_lens_cpu_upper_bound.tolist() == [9, 2]
    assert found.block_table_tensor[:, 0].tolist() == [3, 2]
    assert found.is_prefilling.tolist() == [False, True]
    assert found.req_idx.tolist() == [7, 1]
    assert found.positions.tolist() == found.slot_mapping.tolist() == [8, 0, 1]


def test_hidden_rows_are_written_to_the_requests_blocks():
    from backends.vllm.hybrid.step_forms import StepForms

    found = _a_step(StepForms(hidden=HIDDEN)).batch()
    assert found.plain.tolist() == [0, 8, 9]
    # Token 10 of one request and 0 to 5 of another; a block has 8 rows.
    assert found.hidden.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.hidden_slots.tolist() == [6 * 8 + 2, *range(8 * 8, 8 * 8 + 6)]
    assert found.decoding.tolist() == [1]
    assert found.decoding_held.tables.tolist() == [[4, 6]]
    (chunk,) = found.chunks
    assert (chunk.first, chunk.end, chunk.past) == (2, 8, 0)


def test_a_converted_request_is_rewritten_from_its_first_token():
    from backends.vllm.hybrid.step_forms import StepForms

    (found,) = _a_step(StepForms(converted={3: 8})).batch().conversions
    # Eight rows of block 3 become keys and values of blocks 3 and 5, four tokens each.
    assert found.held.tables.tolist() == [[3]]
    assert found.slots.tolist() == [*range(12, 16), *range(20, 24)]
