"""Truncated ids equal those of a tokenizer that truncates by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from backends.embedding.truncation import Truncation
from controlplane.core.errors import Refused

WORDS = ["a", "b", "c", "d", "e"]
VOCABULARY = {word: number for number, word in enumerate([*WORDS, "<s>", "</s>", "<q>"])}
FRAMES = ["$A", "$A </s>", "<s> $A", "<s> $A </s>", "<s> <q> $A </s> </s>"]
TEXTS = st.lists(st.sampled_from([*WORDS, "</s>"]), min_size=1, max_size=12).map(" ".join)


def tokenizer(frame: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, VOCABULARY[word]) for word in ("<s>", "</s>", "<q>")]
    made.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    return made


def test_special_tokens_around_a_text_are_found():
    found = Truncation.of(tokenizer("<s> <q> $A </s> </s>"), "left")
    assert found == Truncation(opening=(5, 7), closing=(6, 6), side="left")
    assert Truncation.of(tokenizer("$A"), "right") == Truncation()


@pytest.mark.parametrize("frame", FRAMES)
@given(text=TEXTS, limit=st.integers(1, 14), side=st.sampled_from(["left", "right"]))
def test_truncation_equals_that_of_the_tokenizer(frame, text, limit, side):
    whole, cutting = tokenizer(frame), tokenizer(frame)
    truncation = Truncation.of(whole, side)
    ids = whole.encode(text).ids
    if limit <= truncation.special_tokens and len(ids) > limit:
        with pytest.raises(Refused, match=f"at least {truncation.special_tokens + 1}"):
            truncation.truncate(ids, limit)
        return
    cutting.enable_truncation(max(limit, truncation.special_tokens + 1), direction=side)
    found = truncation.truncate(ids, limit)
    assert found == cutting.encode(text).ids
    assert found == Truncation(truncation.opening, truncation.closing).truncate(ids, limit, side)


def test_token_ids_keep_the_special_tokens_they_contain():
    truncation = Truncation(opening=(5,), closing=(6,))
    assert truncation.truncate([0, 1, 2, 3], 2) == [0, 1]
    assert truncation.truncate([5, 1, 2, 3], 2) == [5, 1]
    assert truncation.truncate([0, 1, 2, 6], 2, "left") == [2, 6]
    assert truncation.truncate([0, 1, 2, 3], 1, "left") == [3]


def test_a_tokenizer_without_letters_is_rejected():
    mute = tokenizer("<s> $A </s>")
    mute.normalizer = normalizers.Replace("a", "")
    with pytest.raises(ValueError, match="no token for 'a'"):
        Truncation.of(mute, "right")
