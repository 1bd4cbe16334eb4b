"""The public operations refuse arguments that the kernels could not handle."""

from dataclasses import replace

import pytest
import torch
from hybridcache import ops
from hybridcache.layout import Rotary

from tests.kernels.hybridcache.cases import a_case


@pytest.fixture(scope="module")
def case():
    return a_case([5, 20], rotated=16)


def test_int64_tables_are_refused(case):
    held = replace(case.held, tables=case.held.tables.long())
    with pytest.raises(ValueError, match=r"torch.int64, lengths of torch.int32: both must be int32"):
        ops.hidden_scores(torch.zeros(2, 4, 128), case.hidden, held)


def test_tables_that_are_too_narrow_are_refused(case):
    held = replace(case.held, longest=33)
    with pytest.raises(ValueError, match=r"blocks of 16 tokens cannot hold longest=33"):
        ops.hidden_scores(torch.zeros(2, 4, 128), case.hidden, held)


def test_strided_rows_are_refused(case):
    with pytest.raises(ValueError, match=r"hidden: stride 256 in dimension 1, expected 128"):
        ops.scatter_rows(torch.zeros(1, 128), torch.tensor([0]), torch.zeros(2, 4, 256)[..., :128])


def test_a_query_of_another_dtype_is_refused(case):
    with pytest.raises(ValueError, match=r"query: .* of torch.float16 .* expected .* of torch.float32"):
        ops.rotated_scores(
            case.query.half(), case.hidden, case.held, case.projection, case.rotary, case.scale
        )


def test_too_few_angles_are_refused(case):
    short = Rotary(case.rotary.cos[:10], case.rotary.sin[:10])
    with pytest.raises(ValueError, match=r"at least 20 positions, at most 16"):
        ops.rotated_scores(case.query, case.hidden, case.held, case.projection, short, case.scale)


def test_a_transposed_weight_is_refused(case):
    turned = case.projection._replace(key_weight=case.projection.key_weight.T.contiguous().T)
    with pytest.raises(ValueError, match=r"key_weight: stride 128 in dimension 1, expected 1"):
        ops.rotated_scores(case.query, case.hidden, case.held, turned, case.rotary, case.scale)


def test_strided_non_integer_and_remote_slots_are_refused(case):
    rows = torch.zeros(2, 128)
    for slots in (torch.tensor([0, 1, 2, 3])[::2], torch.zeros(2), torch.tensor([0, 1], device="meta")):
        with pytest.raises(ValueError, match=r"slots: "):
            ops.scatter_rows(rows, slots, case.hidden)


def test_tensors_on_another_device_are_refused(case):
    """A kernel would dereference their addresses."""
    away = replace(case.held, lengths=case.held.lengths.to("meta"))
    with pytest.raises(ValueError, match=r"held.lengths: .* on meta, expected .* on cpu"):
        ops.hidden_scores(torch.zeros(2, 4, 128), case.hidden, away)
    angles = Rotary(case.rotary.cos, case.rotary.sin.to("meta"))
    with pytest.raises(ValueError, match=r"rotary.sin of torch.float32 on meta: .* on cpu"):
        ops.rotated_scores(case.query, case.hidden, case.held, case.projection, angles, case.scale)
