"""Log probabilities that have been returned are not kept, and each output still has its own."""

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]


def test_those_of_the_last_tokens_are_kept_only():
    import numpy as np
    from vllm.logprobs import create_sample_logprobs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.outputs import LogprobsLists

    from backends.vllm.returned_logprobs import forget_returned_logprobs

    forget_returned_logprobs()
    forget_returned_logprobs()
    processor = LogprobsProcessor(
        tokenizer=None, logprobs=create_sample_logprobs(False), prompt_logprobs=None,
        cumulative_logprob=0.0, num_logprobs=1, num_prompt_logprobs=None,
    )  # fmt: skip
    text = SimpleNamespace(get_next_output_text=lambda *_: "")
    state = RequestState(
        "id", "id", None, 0, None, RequestOutputKind.DELTA, None, [1], None, processor, text,
        None, 0.0, None, False, 1,
    )  # fmt: skip
    for step in range(10):
        tokens = [2 * step, 2 * step + 1]
        values = np.array([[token, token + 1] for token in tokens])
        processor._update_sample_logprobs(LogprobsLists(values, -1.0 * values, np.array([1, 1]), None))
        output = state._new_completion_output(tokens, None, None)
        assert [next(iter(position)) for position in output.logprobs or ()] == tokens
    assert [next(iter(position)) for position in processor.logprobs or ()] == [16, 17, 18, 19]
