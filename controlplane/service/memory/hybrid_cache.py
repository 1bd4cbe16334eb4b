"""May requests of the chat model keep hidden states, and what would that save?"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from backends.vllm.hybrid.support import HybridSetup, fallbacks, memory_ratio, refusal
from controlplane.config import Config, ConfigError
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts

log = logging.getLogger(__name__)

Facts = Callable[[str], ModelFacts]


def hybrid_setup(config: Config, facts: Facts) -> HybridSetup | None:
    """None for keys and values only. Raises ConfigError where hidden states are asked for and cannot be."""
    chat = config.models.chat
    if chat is None or chat.hybrid_cache == "off":
        return None
    said = f"models.chat.hybrid_cache={chat.hybrid_cache}"
    if config.scheduling.engine is None:
        raise ConfigError(
            f"{said}: the scheduler in the engine decides who keeps hidden states; set scheduling.engine, "
            "{} for its defaults"
        )
    reason = _refusal(config, facts)
    if reason is None:
        architecture = facts(chat.model).config["architectures"][0]
        log.info("%s: requests may keep hidden states; prefix caching is off, as they cannot be shared", said)
        return HybridSetup(architecture, chat.hybrid_cache)
    if chat.hybrid_cache == "on":
        raise ConfigError(f"{said}: {reason}; choose auto or off")
    log.info("%s: requests keep keys and values only. %s", said, reason)
    return None


def hybrid_described(config: Config, facts: Facts, plan: MemoryPlan) -> str | None:
    """A line for a person; None without a chat model. Raises as `hybrid_setup`."""
    chat, geometry = config.models.chat, plan.geometry
    if chat is None or geometry is None:
        return None
    setup = hybrid_setup(config, facts)
    title = f"hybrid cache: {chat.hybrid_cache}"
    reason = _refusal(config, facts)
    if reason is not None:
        told = [f"{title}; not for this model and engine ({reason})"]
        return "\n".join([*told, *_instead(chat.engine, plan)])
    ratio = memory_ratio(facts(chat.model).config)
    tokens = plan.max_model_tokens
    rows = int(geometry.block_tokens / ratio)
    hidden = plan.kv_blocks // -(-tokens // rows)
    verb = "would take" if setup is None else "take"
    return (
        f"{title}; hidden states {verb} {ratio:g} of the memory: {hidden:,} instead of "
        f"{plan.concurrent(tokens):,} requests of {tokens:,} tokens side by side; without prefix caching"
    )


def _instead(engine: Mapping[str, Any], plan: MemoryPlan) -> Iterator[str]:
    """What the operator may choose in the place of hidden states."""
    if plan.geometry is None:
        return
    tokens, size = plan.max_model_tokens, plan.geometry.bytes_per_element
    for fallback in fallbacks(engine, size):
        smaller = replace(plan, geometry=replace(plan.geometry, bytes_per_element=fallback.element_bytes))
        stated = ", ".join(f"{name}: {value}" for name, value in fallback.arguments.items())
        yield (
            f"  instead, models.chat.engine {{{stated}}}: {fallback.name} take "
            f"{fallback.element_bytes / size:g} of the memory, {smaller.concurrent(tokens):,} instead of "
            f"{plan.concurrent(tokens):,} requests of {tokens:,} tokens; {fallback.loss}"
        )


def _refusal(config: Config, facts: Facts) -> str | None:
    chat = config.models.chat
    return None if chat is None else refusal(facts(chat.model).config, chat.engine)
