"""How long does a batch take? Models of one engine step, in seconds, without an engine.

`tile` is Llama-2-70B on A100s after Vidur's profile: GEMMs run in tiles of 128 tokens, so time rises in
stairs. `affine` is the straight line that most papers fit.
"""

from collections.abc import Callable, Mapping
from math import ceil

TILE_TOKENS = 128

StepTime = Callable[[int, int, int], float]
"""(prefill tokens, decoding requests, KV cells read: those held before the step) -> seconds."""

LLAMA2_70B_TP1 = (0.09255, 2.093e-4, 0.04804, 2.5e-7)
LLAMA2_70B_TP2 = (0.05633, 1.859e-4, 0.01426, 1.25e-7)


def tile(a: float, b: float, g: float, d: float) -> StepTime:
    """a + b * tokens + g * (tiles - 1) + d * cells."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        tokens = prefill_tokens + decodes
        return a + b * tokens + g * (ceil(tokens / TILE_TOKENS) - 1) + d * cells

    return step_time


def affine(a: float, b: float, c: float, d: float) -> StepTime:
    """a + b * prefill tokens + c * decodes + d * cells."""

    def step_time(prefill_tokens: int, decodes: int, cells: int) -> float:
        return a + b * prefill_tokens + c * decodes + d * cells

    return step_time


MODELS: Mapping[str, Callable[[float, float, float, float], StepTime]] = {"tile": tile, "affine": affine}


def pace(step_time: StepTime, memory: int) -> tuple[float, float]:
    """Seconds of an ordinary step (one tile of decodes, memory half full) and of one more prompt token."""
    ordinary = step_time(0, TILE_TOKENS, memory // 2)
    tokens = 8 * TILE_TOKENS
    return ordinary, (step_time(tokens, TILE_TOKENS, 0) - step_time(0, TILE_TOKENS, 0)) / tokens
