"""Predicts the device bytes of one embedding pass.

`base + per_token * inputs * padded_length + 4 * inputs * dimension`. `base` and `per_token` are profiled at
startup where the peak of a pass can be read (CUDA's allocator, the resident memory of a Linux process), and
bound every measured point; a later pass that takes more raises them. Elsewhere they are a prior from the
model's config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_FLOAT32_BYTES = 4
# Hidden-size vectors per token that are live at once in an encoder layer: residual stream, its norm, query,
# key, value, attention output, its projection, and one copy for a cast or a transpose.
_HIDDEN_COPIES = 8
# Where a config states no hidden size.
_USUAL_HIDDEN = 1_024


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Peak bytes of one pass above the idle model."""

    inputs: int
    padded_length: int
    peak_bytes: int

    @property
    def tokens(self) -> int:
        """Padded tokens of the pass."""
        return self.inputs * self.padded_length


@dataclass(frozen=True, slots=True)
class EmbeddingMemory:
    """Coefficients of the memory of a pass, in bytes."""

    base: int
    per_token: float
    dimension: int

    def pass_bytes(self, inputs: int, padded_length: int) -> int:
        """Bytes of one pass."""
        return round(self.base + self.per_token * inputs * padded_length) + self._output_bytes(inputs)

    def batch_bytes(self, token_counts: Sequence[int], *, budget_tokens: int) -> int:
        """Bytes of the largest pass that these inputs may need under the token budget."""
        if not token_counts:
            return 0
        longest, shortest = max(token_counts), min(token_counts)
        tokens = min(len(token_counts) * longest, max(budget_tokens, longest))
        rows = min(len(token_counts), max(1, budget_tokens // max(1, shortest)))
        return round(self.base + self.per_token * tokens) + self._output_bytes(rows)

    def max_tokens(self, limit_bytes: int) -> int:
        """Padded tokens of the largest pass within `limit_bytes`.

        Each token counts as an input of its own, which bounds the output vectors from above.
        """
        per_token = self.per_token + _FLOAT32_BYTES * self.dimension
        return max(0, int((limit_bytes - self.base) / per_token))

    def raised_to_cover(self, point: MemoryPoint) -> "EmbeddingMemory":
        """Returns this model, with a larger `per_token` if the measured pass took more than predicted."""
        if point.peak_bytes <= self.pass_bytes(point.inputs, point.padded_length):
            return self
        over = point.peak_bytes - self.base - self._output_bytes(point.inputs)
        return replace(self, per_token=over / point.tokens)

    def workspace_bytes(self, *, budget_tokens: int, max_input_tokens: int) -> int:
        """Bytes of the largest pass that the token budget allows for any inputs."""
        tokens = max(budget_tokens, max_input_tokens)
        return round(self.base + self.per_token * tokens) + self._output_bytes(tokens)

    def _output_bytes(self, inputs: int) -> int:
        return _FLOAT32_BYTES * inputs * self.dimension


def prior(
    config: Mapping[str, Any], *, bytes_per_element: int, dimension: int | None = None
) -> EmbeddingMemory:
    """Estimates memory from a Hugging Face config, without a base.

    A token takes bytes_per_element * (8 * hidden_size + intermediate_size). Vectors have the hidden size
    unless their `dimension` is known.
    """
    text = config.get("text_config") or config
    stated = text.get("hidden_size") or text.get("d_model") or text.get("dim")
    hidden = int(stated or dimension or _USUAL_HIDDEN)
    inner = int(text.get("intermediate_size") or text.get("d_ff") or text.get("hidden_dim") or 4 * hidden)
    per_token = bytes_per_element * (_HIDDEN_COPIES * hidden + inner)
    return EmbeddingMemory(0, per_token, dimension or hidden)


def fit_memory_model(points: Sequence[MemoryPoint], *, dimension: int) -> EmbeddingMemory:
    """Fits the lowest line through the smallest point that lies above all other points.

    Raises ValueError without two points of different size.
    """
    ordered = sorted(points, key=lambda p: (p.tokens, p.peak_bytes))
    if len(ordered) < 2 or ordered[0].tokens == ordered[-1].tokens:
        raise ValueError(f"memory grid of {len(points)} points: two passes of different size are needed")
    base = ordered[0].peak_bytes
    rise = ((p.peak_bytes - _FLOAT32_BYTES * p.inputs * dimension - base) / p.tokens for p in ordered[1:])
    return EmbeddingMemory(base, max(0.0, *rise), dimension)
