"""Decides whether a model and its engine arguments allow the hidden-state cache, and lists alternatives.

Needs neither torch nor vLLM.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "TandemHybrid"

ARCHITECTURES = ("OPTForCausalLM", "LlamaForCausalLM")

# Engine arguments that must be 1, unset or at their default, with the reason.
_MUST_BE_ONE = {
    "tensor_parallel_size": "every rank would store whole hidden states, but only its part of the heads",
    "pipeline_parallel_size": "the forms of a step are sent to one worker",
    "data_parallel_size": "each engine would need a scheduler of its own",
    "decode_context_parallel_size": "a request's blocks would lie on several devices",
    "prefill_context_parallel_size": "a prompt's rows would lie on several devices",
}
_MUST_BE_UNSET = {
    "enable_lora": "an adapter changes the projections that restore keys and values",
    "speculative_config": "a draft's tokens have no hidden states of the target model",
    "kv_transfer_config": "other engines expect keys and values",
    "kv_offloading_size": "blocks loaded back would be read as keys and values",
    "quantization": "the projections must be plain matrices",
    "enable_dbo": "each half of a batch would be split as if it were the whole batch",
    "enable_prefix_caching": "a block of hidden states cannot be shared as keys and values",
}
_MUST_BE_DEFAULT = {
    "kv_cache_dtype": (("auto",), "hidden states are stored in the model's dtype"),
    "model_impl": (("auto", "vllm"), "only vLLM's own models pass attention the layer's input"),
    "worker_cls": (("auto",), "the hidden-state cache needs its own worker class, which takes its place"),
}


def refusal(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """The reason why the hidden-state cache cannot be used; None if it can.

    Args:
        config: the model's `config.json`.
        arguments: vLLM's engine arguments.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture}: supported are {' and '.join(ARCHITECTURES)}"
    if config.get("sliding_window"):
        return f"sliding_window={config['sliding_window']}: blocks outside the window are freed"
    if config.get("quantization_config"):
        return f"quantization_config: {_MUST_BE_UNSET['quantization']}"
    ratio = memory_ratio(config)
    if ratio >= 1:
        return (
            f"h={ratio:g}: a hidden state takes {ratio:g} times the memory of its keys and values, "
            "because heads share them"
        )
    if _kv_heads(config) != config["num_attention_heads"]:
        return f"num_key_value_heads={_kv_heads(config)}: decoding needs heads with their own keys"
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
    """Memory of a token's hidden state over that of its keys and values; 1 or more saves nothing."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return float(config["hidden_size"] / (2 * _kv_heads(config) * head_dim))


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def scratch_bytes(config: Mapping[str, Any], *, requests: int, tokens: int) -> int:
    """Temporary bytes of a layer while `requests` of `tokens` each decode from hidden states in 16 bits.

    These are the scores and weights of each head and token, and the absorbed queries and sums of each head.
    """
    per_head = tokens * (4 + 4 + 2) + 2 * config["hidden_size"] * 2
    return int(requests * config["num_attention_heads"] * per_head)


@dataclass(frozen=True, slots=True)
class HybridSetup:
    """Hidden-state cache for a model architecture; `forms` is a key of `scheduling.FORMS`."""

    architecture: str
    forms: str

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the engine arguments `given` with those of the hidden-state cache added."""
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


@dataclass(frozen=True, slots=True)
class Fallback:
    """Engine arguments that shrink the KV cache where hidden states would not.

    The operator chooses one, because each has a cost.

    Attributes:
        name: short description.
        arguments: vLLM engine arguments.
        element_bytes: bytes of a cached number under them.
        loss: the cost.
    """

    name: str
    arguments: Mapping[str, str]
    element_bytes: int
    loss: str


FALLBACKS = (
    Fallback(
        "keys and values in 8 bits",
        {"kv_cache_dtype": "fp8"},
        1,
        "lossy: keys and values are rounded to 3 bits of mantissa, and outputs change",
    ),
)


def fallbacks(arguments: Mapping[str, Any], element_bytes: int) -> Iterator[Fallback]:
    """The fallbacks that take less than `element_bytes` a number and override no given argument."""
    for fallback in FALLBACKS:
        is_open = all(arguments.get(name, "auto") == "auto" for name in fallback.arguments)
        if is_open and fallback.element_bytes < element_bytes:
            yield fallback
