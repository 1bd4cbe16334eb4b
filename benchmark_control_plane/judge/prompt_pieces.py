"""Reads from a recording which prefixes its prompts share, by the pieces that each prompt consists of.

RAGPulse states the pieces of a prompt by kind, each by a number, in the order of the prompt; the tokens of
each piece are in a file for each kind beside the trace. The prefix of a prompt is the longest run of its
first pieces that at least `MANY` prompts begin with: what a caller can know and name, such as the system
prompt of a day.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.row_files import rows

MANY = 10
_TRACE, _KINDS = "0_trace", ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
_TOKENS = "token_length"


def in_order(pieces: Mapping[str, Iterable[int]]) -> tuple[int, ...]:
    """The pieces of all kinds."""
    return tuple(chain.from_iterable(pieces.values()))


def shared_prefixes(prompts: Sequence[tuple[int, ...]], tokens: Mapping[int, int]) -> list[tuple[str, int]]:
    """Name and tokens of each prompt's prefix, in the order of `prompts`; an empty name and 0 without one."""
    runs = Counter(pieces[:end] for pieces in prompts for end in range(1, len(pieces) + 1))
    found = []
    for pieces in prompts:
        shared = sum(runs[pieces[:end]] >= MANY for end in range(1, len(pieces) + 1))
        prefix = pieces[:shared]
        found.append(("-".join(map(str, prefix)), sum(tokens[piece] for piece in prefix)))
    return found


def piece_tokens(trace: Path) -> dict[int, int]:
    """Tokens of every piece, from the files beside the trace. Raises BadInput if one cannot be read."""
    found: dict[int, int] = {}
    for kind in _KINDS:
        path = trace.with_name(trace.name.replace(_TRACE, kind))
        for row in rows(path):
            number = _number_of(row, path)
            found[number] = int(row[_TOKENS])
    return found


def _number_of(row: Mapping[str, Any], path: Path) -> int:
    """The piece that a row is about: its one column beside the tokens."""
    numbers = [value for name, value in row.items() if name != _TOKENS]
    if len(numbers) != 1 or _TOKENS not in row:
        raise BadInput(f"{path}: should have a piece and its {_TOKENS!r} in a row; it has {', '.join(row)}")
    return int(numbers[0])
