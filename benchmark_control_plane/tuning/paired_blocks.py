"""Compares configurations with the operator's on one set of blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark_control_plane.tuning.comparison import Comparison, compare
from benchmark_control_plane.tuning.evaluation import BlockResult, Evaluator, Sections
from benchmark_control_plane.tuning.search_space import Changes, SearchSpace


class ConfigurationRefused(Exception):
    """The server refuses the operator's configuration on the log's machine; the message is its reason."""


@dataclass(frozen=True, slots=True)
class PairedBlocks:
    """One set of blocks.

    Attributes:
        evaluator: replays configurations on blocks.
        numbers: the evaluator's numbers of these blocks, in the order in which they are used.
        space: the operator's configuration and the keys that may change.
        weights: weights of the classes in it.
        served: the sections of a YAML content that decide how requests are served; raises ConfigError or
            BadInput.
    """

    evaluator: Evaluator
    numbers: Sequence[int]
    space: SearchSpace
    weights: Mapping[str, float]
    served: Callable[[Mapping[str, Any]], Sections]

    def compare(self, variants: Sequence[Changes], count: int | None = None) -> list[Comparison | None]:
        """Compares several configurations at once, so that no processor waits.

        Args:
            variants: changes to the operator's configuration; each must be a valid configuration.
            count: only the first so many blocks; None for all.

        Returns one comparison each; None for a configuration that the server refuses. Raises
        ConfigurationRefused.
        """
        numbers = self.numbers[:count]
        chosen = [self.served(self.space.changed(each)) for each in [{}, *variants]]
        found = self.evaluator.results([(sections, number) for sections in chosen for number in numbers])
        parts = [found[at : at + len(numbers)] for at in range(0, len(found), len(numbers))]
        own, *others = parts
        if (reason := _refusal(own)) is not None:
            raise ConfigurationRefused(reason)
        blocks = [self.evaluator.blocks[number] for number in numbers]
        before = [each.requests for each in own]
        return [
            None
            if _refusal(other) is not None
            else compare(
                blocks, before, [each.requests for each in other], self.weights, changed=len(variant)
            )
            for other, variant in zip(others, variants, strict=True)
        ]


def _refusal(results: Sequence[BlockResult]) -> str | None:
    return next((each.refused for each in results if each.refused is not None), None)
