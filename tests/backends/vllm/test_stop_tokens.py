"""Stop tokens that are refused before the engine, which older releases of vLLM end at."""

import pytest

from controlplane.core.errors import Refused
from controlplane.core.generation import Sampling


@pytest.mark.parametrize("token_id", [9, 2**63, 10**30])
def test_stop_tokens_beyond_the_vocabulary_are_refused(token_id: int):
    from backends.vllm.sampling import sampling_params

    def made(*stop_token_ids: int) -> list[int]:
        stated = Sampling(max_tokens=4, min_tokens=1, stop_token_ids=stop_token_ids)
        return sampling_params(
            stated, {}, structure=None, skip_special_tokens=True, vocabulary=9
        ).stop_token_ids

    assert made(7, 8) == [7, 8]
    with pytest.raises(Refused, match=rf"has the id {token_id}; the highest of the model is 8\.") as caught:
        made(7, token_id)
    assert caught.value.param == "stop_token_ids"
