"""Tests of prompt features: they predict the length and do not contain the prompt."""

from hypothesis import given
from hypothesis import strategies as st

from predictors.output_length.features import BUCKETS, MOST_WORDS, NUMBERS, chat_features, prompt_features


def number(features, name):
    return features.numbers[NUMBERS.index(name)]


def test_requested_lengths_and_cues():
    features = prompt_features("Write a detailed 300-word essay about bees. Why do they dance?")
    assert (number(features, "is_asked"), number(features, "long"), number(features, "story")) == (1, 1, 1)
    assert number(features, "ends_with_question") == 1
    assert (
        number(prompt_features("Name 3 paragraphs of law"), "log_asked") > number(features, "log_asked") - 0.3
    )
    assert number(prompt_features("What is DNA?"), "is_asked") == 0


def test_last_user_turn_is_the_prompt():
    chat = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "essay"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": "a list"}, {"type": "image_url"}]},
    ]
    features = chat_features(chat)
    assert features.words == prompt_features("a list").words
    assert number(features, "turns") == 4
    assert number(features, "log_system") > 2 and number(features, "log_before") > 1


def test_word_buckets_are_equal_in_every_process():
    assert prompt_features("count words").words == (7820, 8629, 12964, 17506, 31579)


@given(st.text(max_size=5_000))
def test_features_are_bounded_for_any_text(text):
    features = prompt_features(text)
    assert len(features.numbers) == len(NUMBERS)
    assert len(features.words) <= MOST_WORDS
    assert all(0 <= word < BUCKETS for word in features.words)
    assert not any(isinstance(part, str) for part in features.numbers + features.words)
