"""Token ids and words of prompts; those of one prefix group begin alike, all other parts are random."""

import random

from benchmark_control_plane.judge.workload import PlannedRequest

# Token ids that exist in every vocabulary, above the special tokens.
_IDS = range(300, 1_900)
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")


def prompt_ids(planned: PlannedRequest, draw: random.Random) -> list[int]:
    """Token ids of the prompt; what is not shared comes from `draw`."""
    shared = random.Random(planned.prefix_group).choices(_IDS, k=planned.prefix_tokens)
    return shared + draw.choices(_IDS, k=planned.prompt_tokens - planned.prefix_tokens)


def prompt_text(planned: PlannedRequest, draw: random.Random) -> str:
    """One word per token of the prompt; what is not shared comes from `draw`."""
    shared = random.Random(planned.prefix_group).choices(_WORDS, k=planned.prefix_tokens)
    return " ".join(shared + draw.choices(_WORDS, k=planned.prompt_tokens - planned.prefix_tokens))


def input_ids(count: int, draw: random.Random) -> list[int]:
    """Token ids of one embedding input."""
    return draw.choices(_IDS, k=count)


def input_text(count: int, draw: random.Random) -> str:
    """One word per token of an embedding input."""
    return " ".join(draw.choices(_WORDS, k=count))
