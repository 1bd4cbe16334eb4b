"""What else halves the cache of a model whose heads share keys, where hidden states would not?

A fallback is a choice of engine arguments; the operator makes it, since each one loses something. Known is
one, keys and values in eight bits by vLLM itself. Needs neither torch nor vLLM.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fallback:
    """`arguments` are vLLM's; a cached number takes `element_bytes` under them. `loss` says what is lost."""

    name: str
    arguments: Mapping[str, str]
    element_bytes: int
    loss: str


FALLBACKS = (
    Fallback(
        "keys and values in 8 bits",
        {"kv_cache_dtype": "fp8"},
        1,
        "lossy: they are rounded to 3 bits of mantissa, and answers change",
    ),
)


def fallbacks(arguments: Mapping[str, Any], element_bytes: int) -> Iterator[Fallback]:
    """Those that take less than `element_bytes` a number and replace nothing that was chosen."""
    for one in FALLBACKS:
        is_open = all(arguments.get(name, "auto") == "auto" for name in one.arguments)
        if is_open and one.element_bytes < element_bytes:
            yield one
