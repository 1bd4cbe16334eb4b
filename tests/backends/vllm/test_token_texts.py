"""Texts of single tokens for log probabilities are decoded once per tokenizer."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from backends.bundled_models import resolve

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


def bytes_that_fall_back() -> Any:
    """A tokenizer like that of Llama 2: what is not in its vocabulary is a token for each byte."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\N{LOWER ONE EIGHTH BLOCK}a", "b", "<unk>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "byte fallback"])
def test_tokens_that_end_within_a_character_have_the_texts_of_vllm(kind: str):
    from inspect import unwrap

    from vllm.tokenizers import get_tokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from backends.vllm.token_texts import remember_token_texts

    remember_token_texts()
    tokenizer = get_tokenizer(resolve("tandem/tiny-llama")) if kind == "bytes" else bytes_that_fall_back()
    processor: Any = SimpleNamespace(tokenizer=tokenizer)
    whole = unwrap(LogprobsProcessor._correct_decoded_token)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    incomplete = [token for token, text in enumerate(texts) if text.endswith("\ufffd")]
    draw, completed = random.Random(0), 0
    for _ in range(2_000):
        # Bytes of characters, and any token behind some of them.
        context = draw.choices(incomplete, k=draw.randrange(4))
        context += draw.choices(range(len(tokenizer)), k=draw.randrange(2))
        token = draw.choice(incomplete)
        expected = whole(processor, token, context)
        assert LogprobsProcessor._correct_decoded_token(processor, token, context) == expected
        completed += bool(expected)
    assert completed


def test_behind_a_whole_character_nothing_is_decoded():
    from vllm.v1.engine import logprobs

    from backends.vllm.token_texts import remember_token_texts

    remember_token_texts()
    # It has no method that decodes.
    tokenizer, whole, incomplete = Tokenizer(), 1, 2
    logprobs.convert_ids_list_to_tokens._texts[tokenizer] = {whole: "a", incomplete: "\ufffd"}
    processor: Any = SimpleNamespace(tokenizer=tokenizer)
    correct = logprobs.LogprobsProcessor._correct_decoded_token
    assert correct(processor, incomplete, [incomplete, whole]) == ""
    with pytest.raises(AttributeError, match="decode"):
        correct(processor, incomplete, [whole, incomplete])


def test_vllm_calls_it_for_log_probabilities():
    from vllm.v1.engine import logprobs

    from backends.vllm.token_texts import TokenTexts, remember_token_texts

    remember_token_texts()
    installed = logprobs.convert_ids_list_to_tokens
    assert isinstance(installed, TokenTexts)
    remember_token_texts()
    assert logprobs.convert_ids_list_to_tokens is installed
