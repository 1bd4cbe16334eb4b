"""Token ids of simulated prompts, which share the prefix of their group and nothing else."""

from collections.abc import Sequence

_LONGEST = 1 << 24


def prompt_ids(number: int, tokens: int, *, group: int, shared: int) -> Sequence[int]:
    """Token ids of prompt `number`; the first `shared` of its `tokens` are those of `group`."""
    shared = min(shared, tokens)
    prefix, own = 2 * group * _LONGEST, (2 * number + 1) * _LONGEST
    rest = range(own, own + tokens - shared)
    return [*range(prefix, prefix + shared), *rest] if shared else rest
