import unicodedata

import pytest

from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt
from controlplane.core.text_limits import (
    LONG_TEXT_CHARACTERS,
    TextLimit,
    check_expansion,
    content_length,
    total_length,
)

LIMIT = TextLimit("m", max_tokens=100, token_characters=20)
LONGER = TextLimit("m", max_tokens=1_000, token_characters=20)


class Encoder:
    """A tokenizer of four characters per token that records the lengths of its texts."""

    def __init__(self, characters: int = 4) -> None:
        self.lengths: list[int] = []
        self._characters = characters

    def __call__(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return [1] * -(-len(text) // self._characters)


class Samples(Encoder):
    """A token for each character of a piece that is shorter than a part, and for ten of others."""

    def __call__(self, text: str) -> list[int]:
        self._characters = 1 if len(text) < 1_000 else 10
        return super().__call__(text)


class Mixed(Encoder):
    """A token for each character, but one for sixteen spaces."""

    def __call__(self, text: str) -> list[int]:
        spaces = text.count(" ")
        self.lengths.append(len(text))
        return [1] * (len(text) - spaces + spaces // 16)


def test_a_text_that_cannot_fit_is_refused_unread():
    encode = Encoder()
    with pytest.raises(Refused, match=r"2,001 characters") as refusal:
        LIMIT.encode(encode, "x" * 2_001, param="prompt")
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")
    assert encode.lengths == []


def test_only_the_beginning_of_a_text_that_is_too_long_is_encoded_besides_samples():
    encode = Encoder()
    with pytest.raises(Refused, match="the first 8,000 characters have more"):
        LONGER.encode(encode, "x" * 20_000, param="prompt")
    assert encode.lengths == [78] * 16 + [8_000]


def test_a_text_of_long_tokens_is_encoded_whole_besides_samples():
    encode = Encoder(characters=19)
    assert len(LONGER.encode(encode, "x" * 14_000, param="prompt")) == 737
    assert encode.lengths == [54] * 16 + [14_000]


def test_a_text_whose_samples_have_many_tokens_is_still_encoded():
    """As if all places that were looked at were dense."""
    encode = Samples()
    assert len(LONGER.encode(encode, "x" * 8_001, param="prompt")) == 801
    assert encode.lengths == [31] * 16 + [8_000, 1, 8_001]


@pytest.mark.parametrize("sparse", [0, 1_000_000, 2_000_000])
def test_a_text_that_is_refused_is_never_encoded_in_more_than_a_part(sparse: int):
    limit, encode = TextLimit("m", max_tokens=500_000, token_characters=16), Mixed()
    with pytest.raises(Refused, match="characters have more"):
        limit.encode(encode, " " * sparse + "x" * 1_000_000, param="prompt")
    assert max(encode.lengths) == 131_072


def test_a_long_text_is_encoded_once_besides_a_sixteenth():
    limit, encode = TextLimit("m", max_tokens=500_000, token_characters=16), Encoder()
    assert len(limit.encode(encode, "x" * 1_900_000, param="prompt")) == 475_000
    assert encode.lengths[-1] == 1_900_000 and sum(encode.lengths[:-1]) <= 1_900_000 / 16


@pytest.mark.parametrize("length", [0, 1, 400, 800])
def test_a_short_text_is_encoded_once(length: int):
    encode = Encoder()
    assert len(LIMIT.encode(encode, "x" * length, param="prompt")) == -(-length // 4)
    assert encode.lengths == [length]


def test_counting_ends_once_a_text_is_long():
    """A body may have hundreds of thousands of values."""
    read = 0

    class Counted(dict):
        def values(self):
            nonlocal read
            read += 1
            return super().values()

    options = {"x": [Counted(a=1) for _ in range(10_000)]}
    assert total_length(ChatPrompt([], template_options=options)) > LONG_TEXT_CHARACTERS
    assert read <= LONG_TEXT_CHARACTERS


@pytest.mark.parametrize(
    "value", [[[]] * 5_000, [{}] * 5_000, [10**4_200]], ids=["lists", "objects", "digits"]
)
def test_values_without_text_are_long_together(value: list[object]):
    """A template that writes them as JSON writes at least two characters for each, or all digits."""
    assert total_length(ChatPrompt([], template_options={"x": value})) > LONG_TEXT_CHARACTERS


def test_characters_of_a_conversation():
    call = {"id": "12", "type": "function", "function": {"name": "f", "arguments": "x" * 50}}
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "de"}]},
    ]
    plain = ChatPrompt(messages)
    assert total_length(plain) > 55
    assert content_length(plain) >= 5
    tools = [{"type": "function", "function": {"name": "f", "description": "y" * 9_000}}]
    assert total_length(ChatPrompt(messages, tools)) > 9_000
    assert total_length(ChatPrompt(messages, template_options={"x": ["z" * 7_000]})) > 7_000
    assert total_length(ChatPrompt([], template_options={"x": [1, [2, None], {"ab": "cde"}]})) == 18
    assert content_length(ChatPrompt(messages, tools)) == content_length(plain)


# Its form NFKC has 18 characters, the most of all.
LIGATURE = "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"


@pytest.mark.parametrize(
    "texts",
    [
        [LIGATURE * 5_000],
        [LIGATURE * 100 for _ in range(50)],
        # Ordinary text around it does not hide it.
        ["x" * 100_000 + LIGATURE * 8_192 + "x" * 100_000],
        ["x" * 50_000, LIGATURE * 8_192, "x" * 50_000],
    ],
    ids=["one text", "many texts", "within a text", "among texts"],
)
def test_texts_that_a_tokenizer_makes_many_times_as_long_are_refused(texts: list[str]):
    with pytest.raises(Refused, match="consecutive characters become") as refusal:
        check_expansion(texts, param="input")
    assert (refusal.value.param, refusal.value.code) == ("input", "invalid_value")


def test_a_text_is_refused_before_it_is_encoded_if_it_expands():
    encode = Encoder()
    with pytest.raises(Refused, match="NFKC"):
        TextLimit("m", max_tokens=1_000, token_characters=20).encode(encode, LIGATURE * 5_000, param="prompt")
    assert encode.lengths == []


@pytest.mark.parametrize(
    "text",
    [
        "Hangul \N{HANGUL SYLLABLE GAG}" * 2_000,
        unicodedata.normalize("NFD", "\N{HANGUL SYLLABLE GAG}") * 5_000,
        "\N{HORIZONTAL ELLIPSIS}" * 10_000,
        "\N{VULGAR FRACTION ONE HALF}" * 10_000,
        LIGATURE * 4_000,
        LIGATURE * 500 + "x" * 10_000,
    ],
    ids=["Hangul", "decomposed", "ellipses", "fractions", "a short text", "some ligatures"],
)
def test_other_texts_are_not(text: str):
    assert check_expansion([text], param="input") is None
