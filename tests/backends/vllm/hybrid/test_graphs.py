"""The attention operation is opaque to compilers and stays out of captured graphs."""

from importlib import import_module

import pytest
import torch

# No engine runs, but importing vLLM takes as long.
pytestmark = [pytest.mark.engine, pytest.mark.untimed]


@pytest.fixture
def attention():
    return import_module("backends.vllm.hybrid.attention")


@pytest.fixture
def worker():
    return import_module("backends.vllm.hybrid.worker")


class _Layer(torch.nn.Module):
    def forward(self, rows):
        output = torch.empty_like(rows)
        torch.ops.vllm.tandem_hybrid_attention(rows * 2, rows, rows, rows, output, "layer")
        return output + 1


@pytest.fixture
def in_a_step(attention):
    """A step without metadata, as in vLLM's memory profiling."""
    from vllm.forward_context import ForwardContext, override_forward_context

    layer = torch.nn.Module()
    layer.kv_cache = torch.empty(0)
    context = ForwardContext(no_compile_layers={"layer": layer}, attn_metadata=None, slot_mapping={})
    with override_forward_context(context):
        yield


def test_the_operation_passes_opcheck(in_a_step):
    """Schema, mutation, fake tensors and tracing."""
    query, key, value = (torch.randn(5, 4, 8) for _ in range(3))
    given = (query, key, value, torch.randn(5, 32), torch.empty(5, 4, 8), "layer")
    found = torch.library.opcheck(torch.ops.vllm.tandem_hybrid_attention.default, given)
    assert set(found.values()) == {"SUCCESS"}


def test_a_layer_compiles_without_a_graph_break(in_a_step):
    rows = torch.randn(5, 4, 8)
    compiled = torch.compile(_Layer(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows), _Layer()(rows))
    # Memory profiling samples from the output, so it must be finite.
    assert compiled(rows).eq(1).all()


def test_graphs_are_split_at_the_operation(worker):
    from vllm.compilation.backends import split_graph
    from vllm.config import CompilationConfig, CompilationMode

    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    compilation.set_splitting_ops_for_v1("")
    worker.split_at_attention(compilation)
    _, pieces = split_graph(torch.fx.symbolic_trace(_Layer()), compilation.splitting_ops)
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    assert compilation.splitting_ops_contain_attention()


def test_without_splitting_the_operation_is_not_added(worker):
    from vllm.config import CompilationConfig, CompilationMode

    compilation = CompilationConfig(mode=CompilationMode.NONE)
    compilation.set_splitting_ops_for_v1("")
    worker.split_at_attention(compilation)
    assert compilation.splitting_ops == []


@pytest.mark.parametrize("runner", [1, 2])
def test_full_graphs_become_piecewise_graphs(worker, runner):
    """vLLM's choice on a GPU, given what our backend supports."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    compilation.set_splitting_ops_for_v1("")
    worker.split_at_attention(compilation)
    mode = compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.NEVER, "Hybrid", use_v2_model_runner=runner == 2
    )
    assert mode is CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(
    "name", ["cpu_attn.CPU", "flash_attn.Flash", "triton_attn.Triton", "flex_attention.Flex"]
)
def test_the_backend_is_never_captured_and_needs_contiguous_blocks(name):
    from vllm.v1.attention.backend import AttentionCGSupport

    from backends.vllm.hybrid.batch import hybrid_backend

    module, family = name.split(".")
    base = getattr(import_module(f"vllm.v1.attention.backends.{module}"), f"{family}AttentionBackend")
    backend = hybrid_backend(base)
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert backend.supported_kv_cache_layouts()
    assert all(layout.is_block_compact for layout in backend.supported_kv_cache_layouts())
