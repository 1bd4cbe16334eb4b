"""Batch budgets of the engines as keys that a search may change, and what they change of the log's device.

The simulator forms steps and passes by these budgets, and takes their times from the lines that were fitted
to those of the log: a roofline of memory (base, sequences, KV cells) and compute (prompt tokens). It knows
neither the memory of a larger step nor that of a larger pass, so budgets of tokens only become smaller. More
places than the log had are tried: the KV cache that their requests need is simulated.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmark_control_plane.simulator.simulated_machine import Machine
from controlplane.config import Config, ConfigError

STEP_TOKENS = "models.chat.engine.max_num_batched_tokens"
PLACES = "models.chat.engine.max_num_seqs"
PASS_TOKENS = "models.embeddings.0.batch_tokens"
BUDGETS = (STEP_TOKENS, PLACES, PASS_TOKENS)

EXTRAPOLATED: Mapping[str, str] = dict.fromkeys((STEP_TOKENS, PLACES), "extrapolated: roofline")
"""What a gain by an engine argument rests on: no step of the log was formed under its new value."""

SECTION = "batch_budgets"
"""The section of a replayed configuration that holds the budgets that differ from those of the log."""

_HALVINGS, _DOUBLINGS = 3, 2
# The least that vLLM takes for max_num_batched_tokens where it is not stated.
_LEAST_STEP_TOKENS = 2_048


def budget_values(config: Config, machine: Machine) -> dict[str, tuple[int, ...]]:
    """The values of each budget that may be tried; none of a budget that is not stated or not the log's."""
    found: dict[str, tuple[int, ...]] = {}
    if (chat := config.models.chat) is not None:
        tokens, places = _stated(config, STEP_TOKENS), _stated(config, PLACES)
        # Without chunks a step has to hold the longest prompt.
        is_chunked = chat.engine.get("enable_chunked_prefill") is not False
        if tokens is not None and tokens >= machine.step_tokens and is_chunked:
            least = max(places or 1, machine.geometry.block_tokens)
            found[STEP_TOKENS] = (*_smaller(machine.step_tokens, least), tokens)
        if places == machine.max_running:
            # More places than tokens of a step are refused by vLLM, and those only become fewer.
            most = max(places, _LEAST_STEP_TOKENS if tokens is None else tokens)
            larger = (places << by for by in range(_DOUBLINGS + 1))
            found[PLACES] = (*_smaller(places, 1), *(each for each in larger if each <= most))
    encoders = config.models.encoders
    if len(encoders) == len(config.models.embeddings) == 1:
        batch = encoders[0].batch_tokens
        if batch >= machine.embed_batch_tokens:
            found[PASS_TOKENS] = (*_smaller(machine.embed_batch_tokens, machine.embed_input_tokens), batch)
    return {key: values for key, values in found.items() if len(values) > 1}


def _smaller(value: int, least: int) -> list[int]:
    """Powers of two below the value, ascending, none below `least`."""
    largest = 1 << (value - 1).bit_length() - 1 if value > 1 else 0
    return [each for by in reversed(range(_HALVINGS)) if (each := largest >> by) >= least]


def _stated(config: Config, key: str) -> int | None:
    assert config.models.chat is not None
    found: int | None = config.models.chat.engine.get(key.rpartition(".")[2])
    return found


def check_budgets(config: Config) -> None:
    """Raises ConfigError for budgets that vLLM refuses."""
    if config.models.chat is None:
        return
    tokens, places = _stated(config, STEP_TOKENS), _stated(config, PLACES)
    if tokens is not None and places is not None and tokens < places:
        raise ConfigError(
            f"{STEP_TOKENS}={tokens}: vLLM needs at least {PLACES}={places}; raise it or lower the other"
        )


def with_budgets(machine: Machine, sections: Mapping[str, Any]) -> tuple[Machine, Mapping[str, Any]]:
    """The log's device under the budgets of a configuration, and its other sections."""
    budgets: Mapping[str, int] | None = sections.get(SECTION)
    if budgets is None:
        return machine, sections
    batch = min(machine.embed_batch_tokens, budgets.get(PASS_TOKENS, machine.embed_batch_tokens))
    changed = replace(
        machine,
        step_tokens=min(machine.step_tokens, budgets.get(STEP_TOKENS, machine.step_tokens)),
        max_running=budgets.get(PLACES, machine.max_running),
        embed_batch_tokens=batch,
        # The workspace stays as large as it is.
        workspace_batches=max(1.0, machine.workspace_batches * machine.embed_batch_tokens / batch),
    )
    return changed, {name: section for name, section in sections.items() if name != SECTION}
