"""Bounds the logits that a worker computes at once for the log probabilities of prompts.

vLLM's first model runner computes the logits of all tokens that a step adds to a prompt at once, the second
those of 1,024 tokens of the step. Its start measures the memory of `max_num_seqs` rows of logits, so more
rows take memory that the pool has given to the cache. Here both compute at most `max_num_seqs` rows at once:
a long prompt takes several products with the output matrix instead of one, and no more memory.

vLLM mixes `PromptLogitsExtension` into the worker class (`worker_extension_cls`), in every worker process.
Importing this module does not import vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

EXTENSION = f"{__name__}.PromptLogitsExtension"
_SECOND_RUNNER = "vllm.v1.worker.gpu.sample.prompt_logprob"
_SECOND_METHOD = "compute_prompt_logprobs_with_chunking"


class PromptLogitsExtension:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def bound_prompt_logits(self, rows: int) -> bool:
        """Bounds the rows of logits computed at once for prompts; False if this release has other names."""
        if hasattr(self.model_runner, "_get_prompt_logprobs_dict"):
            _bound_first_runner(self.model_runner, rows)
            return True
        if not hasattr(self.model_runner, "prompt_logprobs_worker"):
            return False
        second = import_module(_SECOND_RUNNER)
        if not hasattr(second, _SECOND_METHOD):
            return False
        setattr(second, _SECOND_METHOD, _in_slices(getattr(second, _SECOND_METHOD), rows))
        return True


def _in_slices(whole: Callable[..., Sequence[Any]], rows: int) -> Callable[..., tuple[Any, ...]]:
    """The second runner's function, called for `rows` tokens of the step at a time.

    It takes token ids and hidden states by row and returns tensors by row.
    """
    import torch

    def in_slices(token_ids: Any, hidden_states: Any, *others: Any, **more: Any) -> tuple[Any, ...]:
        parts = [
            whole(token_ids[at : at + rows], hidden_states[at : at + rows], *others, **more)
            for at in range(0, len(token_ids), rows)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    return in_slices


def _bound_first_runner(runner: Any, rows: int) -> None:
    """Replaces the runner's method by one that calls it for slices of each request's tokens.

    The method reads a request's first token from `num_computed_tokens` and its row of the hidden states from
    the start of the request in the batch, so both are moved by the length of the slices before.
    """
    whole = runner._get_prompt_logprobs_dict

    def in_slices(hidden_states: Any, num_scheduled_tokens: Mapping[str, int]) -> dict[str, Any]:
        complete: dict[str, Any] = {}
        for request_id in list(runner.num_prompt_logprobs):
            scheduled, request = num_scheduled_tokens.get(request_id), runner.requests[request_id]
            if scheduled is None:
                continue
            computed = request.num_computed_tokens
            try:
                for at in range(0, scheduled, rows):
                    request.num_computed_tokens = computed + at
                    part = {request_id: min(rows, scheduled - at)}
                    complete |= whole(hidden_states[at:], part)
            finally:
                request.num_computed_tokens = computed
        return complete

    runner._get_prompt_logprobs_dict = in_slices


async def bound_prompt_logits(llm: Any) -> int:
    """Bounds the logits in every worker of an AsyncLLM; the most prompt tokens with log probabilities.

    0 if a worker cannot be bounded, for example because the operator stated another `worker_extension_cls`.
    """
    config = llm.vllm_config
    if config.parallel_config.worker_extension_cls != EXTENSION:
        return 0
    rows: int = config.scheduler_config.max_num_seqs
    longest: int = config.model_config.max_model_len
    return longest if all(await llm.collective_rpc("bound_prompt_logits", args=(rows,))) else 0
