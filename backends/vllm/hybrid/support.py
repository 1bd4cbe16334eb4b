"""May this model keep hidden states in this engine, and if not, why?

Read from the model's config and the engine's arguments; needs neither torch nor vLLM.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "TandemHybrid"

ARCHITECTURES = ("OPTForCausalLM", "LlamaForCausalLM")

# What must stay at one, unset, or at its default, and why it does not go together with hidden states.
_MUST_BE_ONE = {
    "tensor_parallel_size": "every rank would keep whole hidden states, but only its part of the heads",
    "pipeline_parallel_size": "the forms of a step reach one worker",
    "data_parallel_size": "each engine would need a scheduler of its own",
    "decode_context_parallel_size": "a request's blocks would lie on several devices",
    "prefill_context_parallel_size": "a prompt's rows would lie on several devices",
}
_MUST_BE_UNSET = {
    "enable_lora": "an adapter changes the projections that restore keys and values",
    "speculative_config": "a draft's tokens have no hidden states of the target model",
    "kv_transfer_config": "other engines expect keys and values",
    "kv_offloading_size": "what comes back would be taken for keys and values",
    "quantization": "the projections must be plain matrices",
    "enable_dbo": "each half of a batch would be sorted as if it were the whole",
    "enable_prefix_caching": "a block of hidden states cannot be shared as keys and values",
}
_MUST_BE_DEFAULT = {
    "kv_cache_dtype": (("auto",), "hidden states are kept in the model's own type"),
    "model_impl": (("auto", "vllm"), "only vLLM's own models show attention its input"),
    "worker_cls": (("auto",), "the worker that hears who keeps hidden states takes its place"),
}


def refusal(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Of a model's `config.json` and vLLM's engine arguments; `None` if hidden states save memory."""
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture}: known are {' and '.join(ARCHITECTURES)}"
    if config.get("sliding_window"):
        return f"sliding_window={config['sliding_window']}: blocks outside the window are given back"
    if config.get("quantization_config"):
        return f"quantization_config: {_MUST_BE_UNSET['quantization']}"
    ratio = memory_ratio(config)
    if ratio >= 1:
        return (
            f"h={ratio:g}: a hidden state takes that many times the memory of its keys and values, "
            "because heads share them"
        )
    if _kv_heads(config) != config["num_attention_heads"]:
        return f"num_key_value_heads={_kv_heads(config)}: hidden states are decoded for heads with own keys"
    given = {name: value for name, value in arguments.items() if value}
    for name in sorted(_MUST_BE_ONE.keys() & given.keys()):
        if given[name] != 1:
            return f"{name}={given[name]}: {_MUST_BE_ONE[name]}"
    for name in sorted(_MUST_BE_UNSET.keys() & given.keys()):
        return f"{name}={given[name]}: {_MUST_BE_UNSET[name]}"
    for name in sorted(_MUST_BE_DEFAULT.keys() & given.keys()):
        allowed, reason = _MUST_BE_DEFAULT[name]
        if given[name] not in allowed:
            return f"{name}={given[name]}: {reason}"
    return None


def memory_ratio(config: Mapping[str, Any]) -> float:
    """Of a token's hidden state over its keys and values; 1 or more saves nothing."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return float(config["hidden_size"] / (2 * _kv_heads(config) * head_dim))


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def scratch_bytes(config: Mapping[str, Any], *, requests: int, tokens: int) -> int:
    """What a layer takes besides while so many requests of so many tokens decode from hidden states, in 16
    bits: scores and weights of each head and token, absorbed queries and sums of each head."""
    per_head = tokens * (4 + 4 + 2) + 2 * config["hidden_size"] * 2
    return int(requests * config["num_attention_heads"] * per_head)


@dataclass(frozen=True, slots=True)
class HybridSetup:
    """`forms` as in `scheduling.FORMS`."""

    architecture: str
    forms: str

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The engine arguments that put the hybrid cache into the engine."""
        additional = {**(given.get("additional_config") or {}), "tandem_hybrid": {"forms": self.forms}}
        overrides = {**(given.get("hf_overrides") or {}), "architectures": [PREFIX + self.architecture]}
        return {
            **given,
            "hf_overrides": overrides,
            "additional_config": additional,
            "worker_cls": "backends.vllm.hybrid.worker.HybridWorker",
            "scheduler_cls": "backends.vllm.hybrid.scheduling.make",
            "enable_prefix_caching": False,
        }


# FOLDED fallback.py:
# What else halves the cache of a model whose heads share keys, where hidden states would not?
#
# A fallback is a choice of engine arguments; the operator makes it, since each one loses something. Known is
# one, keys and values in eight bits by vLLM itself. Needs neither torch nor vLLM.


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
