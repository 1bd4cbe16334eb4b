"""A gist says what matters for the length, and nothing that gives the prompt away."""

from hypothesis import given
from hypothesis import strategies as st

from predictors.output_length.features import BUCKETS, MOST_WORDS, NUMBERS, gist_of, gist_of_chat


def number(gist, name):
    return gist.numbers[NUMBERS.index(name)]


def test_asked_lengths_and_cues():
    gist = gist_of("Write a detailed 300-word essay about bees. Why do they dance?")
    assert (number(gist, "is_asked"), number(gist, "long"), number(gist, "story")) == (1, 1, 1)
    assert number(gist, "ends_with_question") == 1
    assert number(gist_of("Name 3 paragraphs of law"), "log_asked") > number(gist, "log_asked") - 0.3
    assert number(gist_of("What is DNA?"), "is_asked") == 0


def test_the_last_user_turn_is_the_prompt():
    chat = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "essay"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": "a list"}, {"type": "image_url"}]},
    ]
    gist = gist_of_chat(chat)
    assert gist.words == gist_of("a list").words
    assert number(gist, "turns") == 4
    assert number(gist, "log_system") > 2 and number(gist, "log_before") > 1


def test_words_are_the_same_in_every_process():
    assert gist_of("count words").words == (7820, 8629, 12964, 17506, 31579)


@given(st.text(max_size=5_000))
def test_any_text_has_a_bounded_gist(text):
    gist = gist_of(text)
    assert len(gist.numbers) == len(NUMBERS)
    assert len(gist.words) <= MOST_WORDS
    assert all(0 <= word < BUCKETS for word in gist.words)
    assert not any(isinstance(part, str) for part in gist.numbers + gist.words)
