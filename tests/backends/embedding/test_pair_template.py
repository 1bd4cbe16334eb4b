"""Joined pairs equal those of a tokenizer that joins, types and truncates by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from backends.embedding.pair_template import PairTemplate, split_types
from controlplane.core.errors import Refused

WORDS = ["a", "b", "c", "d", "e"]
VOCABULARY = {word: number for number, word in enumerate([*WORDS, "<s>", "</s>"])}
BERT = "<s> $A </s> $B:1 </s>:1"
ROBERTA = "<s> $A </s> </s> $B </s>"
BARE = "$A $B"
TEXTS = st.lists(st.sampled_from([*WORDS, "</s>"]), max_size=12).map(" ".join)


def tokenizer(pair: str | None) -> Tokenizer:
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pair is not None:
        special = [(word, VOCABULARY[word]) for word in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=special)
    return made


@pytest.mark.parametrize("pair", [BERT, ROBERTA, BARE])
@given(query=TEXTS, document=TEXTS, limit=st.integers(6, 20), side=st.sampled_from(["left", "right"]))
def test_joined_pairs_equal_those_of_the_tokenizer(pair, query, document, limit, side):
    bare, joining = tokenizer(None), tokenizer(pair)
    template = PairTemplate.of(joining, side)
    joining.enable_truncation(limit, direction=side)
    expected = joining.encode(query, document)
    texts = [bare.encode(text).ids for text in (query, document)]
    for found in (
        template.join(*texts, limit),
        PairTemplate.of(tokenizer(pair), "left").join(*texts, limit, side),
    ):
        ids, types = split_types(np.array(found, np.uint32))
        assert (ids.tolist(), types.tolist()) == (expected.ids, expected.type_ids)


def test_special_tokens_carry_their_types():
    template = PairTemplate.of(tokenizer(BERT), "right")
    assert (template.opening, template.middle, template.closing) == ((5,), (6,), (6 | 1 << 31,))
    assert (template.special_tokens, template.document_type) == (3, 1)


def test_a_limit_without_room_for_both_texts_is_refused():
    with pytest.raises(Refused, match=r"truncate_prompt_tokens=4: .* set at least 5"):
        PairTemplate.of(tokenizer(BERT), "right").join([1], [2], 4)


def test_a_tokenizer_that_puts_the_document_first_is_rejected():
    with pytest.raises(ValueError, match="second text"):
        PairTemplate.of(tokenizer("$B $A"), "right")
