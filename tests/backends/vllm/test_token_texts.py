"""Texts of single tokens for log probabilities are decoded once per tokenizer."""

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]


class Tokenizer:
    """Can be referenced weakly, as those of vLLM."""


def test_each_token_is_decoded_once_per_tokenizer():
    from backends.vllm.token_texts import TokenTexts

    decoded: list[list[int]] = []

    def decode(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
        decoded.append(token_ids)
        return [f"{id(tokenizer)}-{token}" for token in token_ids]

    texts, first, second = TokenTexts(decode), Tokenizer(), Tokenizer()
    assert texts(first, [3, 1, 3]) == [f"{id(first)}-{token}" for token in (3, 1, 3)]
    assert texts(first, [1, 2]) == [f"{id(first)}-{token}" for token in (1, 2)]
    assert texts(second, [1]) == [f"{id(second)}-1"]
    assert texts(second, []) == []
    assert decoded == [[3, 1, 3], [2], [1]]


def test_vllm_calls_it_for_log_probabilities():
    from vllm.v1.engine import logprobs

    from backends.vllm.token_texts import TokenTexts, remember_token_texts

    remember_token_texts()
    installed = logprobs.convert_ids_list_to_tokens
    assert isinstance(installed, TokenTexts)
    remember_token_texts()
    assert logprobs.convert_ids_list_to_tokens is installed
