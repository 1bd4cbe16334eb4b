"""The bound on the logits that a worker computes at once, on stand-ins for vLLM's model runners."""

from types import SimpleNamespace

import torch

from backends.vllm.prompt_logits import EXTENSION, PromptLogitsExtension, bound_prompt_logits

PROMPT = list(range(100, 120))


class FirstRunner:
    """Collects what vLLM's method is asked for, and ends a prompt as it does."""

    def __init__(self, computed: int) -> None:
        self.num_prompt_logprobs = {"a": 1, "waits": 1}
        self.requests = {name: SimpleNamespace(num_computed_tokens=computed) for name in ("a", "waits")}
        self.calls: list[tuple[int, int, int]] = []

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        [(name, tokens)] = num_scheduled_tokens.items()
        start = self.requests[name].num_computed_tokens
        self.calls.append((start, tokens, hidden_states[0]))
        if start + tokens < len(PROMPT):
            return {}
        del self.num_prompt_logprobs[name]
        return {name: "whole"}


def extension(runner: object) -> PromptLogitsExtension:
    worker = PromptLogitsExtension()
    worker.model_runner = runner
    return worker


def test_the_first_runner_computes_slices_of_each_prompt():
    runner = FirstRunner(computed=2)
    assert extension(runner).bound_prompt_logits(8)
    found = runner._get_prompt_logprobs_dict(list(range(18)), {"a": 18, "decodes": 1})
    assert found == {"a": "whole"}
    assert runner.calls == [(2, 8, 0), (10, 8, 8), (18, 2, 16)]
    assert runner.requests["a"].num_computed_tokens == 2


def test_a_part_of_a_prompt_returns_nothing_yet():
    runner = FirstRunner(computed=0)
    extension(runner).bound_prompt_logits(8)
    assert runner._get_prompt_logprobs_dict(list(range(10)), {"a": 10}) == {}
    assert runner.calls == [(0, 8, 0), (8, 2, 8)]
    assert "a" in runner.num_prompt_logprobs


def test_the_second_runner_computes_slices_of_the_step(monkeypatch):
    called: list[tuple[int, ...]] = []

    def whole(token_ids, hidden_states, logits_fn, count, mode):
        called.append((len(token_ids), logits_fn, count, mode))
        return token_ids + hidden_states, token_ids, hidden_states

    module = SimpleNamespace(compute_prompt_logprobs_with_chunking=whole)
    monkeypatch.setattr("backends.vllm.prompt_logits.import_module", lambda _: module)
    assert extension(SimpleNamespace(prompt_logprobs_worker=None)).bound_prompt_logits(8)
    ids, states = torch.arange(18), 100 * torch.arange(18)
    found = module.compute_prompt_logprobs_with_chunking(ids, states, 1, 2, "raw_logprobs")
    assert called == [(8, 1, 2, "raw_logprobs"), (8, 1, 2, "raw_logprobs"), (2, 1, 2, "raw_logprobs")]
    assert [column.tolist() for column in found] == [(ids + states).tolist(), ids.tolist(), states.tolist()]


async def longest(extension_class: str, replies: list[bool]) -> int:
    async def collective_rpc(method: str, *, args: tuple[int, ...]) -> list[bool]:
        assert (method, args) == ("bound_prompt_logits", (64,))
        return replies

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=extension_class),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        model_config=SimpleNamespace(max_model_len=2048),
    )
    return await bound_prompt_logits(SimpleNamespace(vllm_config=config, collective_rpc=collective_rpc))


async def test_without_a_bound_no_prompt_is_served():
    assert not extension(SimpleNamespace()).bound_prompt_logits(8)
    assert await longest(EXTENSION, [True, True]) == 2048
    assert await longest(EXTENSION, [True, False]) == 0
    assert await longest("other.Extension", [True]) == 0
