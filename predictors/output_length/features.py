"""Extracts the features of a prompt that predict the output length: numbers and hashed words, never the text.

Lengths are counted over the whole prompt; words and cues come from its first and last characters, where tasks
are usually stated, so the cost is bounded. In a chat only the words of the last user turn are kept.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import log1p
from typing import Any
from zlib import crc32

from controlplane.core.request import PromptFeatures

BUCKETS = 1 << 15
MOST_WORDS = 192
_HEAD, _TAIL = 1_500, 700

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_LENGTH_ASKED = re.compile(
    r"\b(\d{1,5})[\s-]*(?:\w+\s+)?"
    r"(words?|sentences?|paragraphs?|lines?|items?|bullets?|examples?|steps?|pages?|tokens?|characters?)\b"
)
_TOKENS_EACH = {
    "word": 1.4, "sentence": 25, "paragraph": 110, "line": 12, "item": 25, "bullet": 25, "example": 60,
    "step": 35, "page": 600, "token": 1, "character": 0.25,
}  # fmt: skip

# A cue is a pattern that indicates what kind of output is requested.
CUES: Mapping[str, str] = {
    "code": r"```|\bdef |\bclass |\bimport |#include|\bfunction\b|\bcode\b|\bprogram\b|\bscript\b|\bsql\b",
    "write": r"\b(?:write|create|generate|compose|draft|develop|design|implement)\b",
    "explain": r"\b(?:explain|describe|discuss|why|compare|analy[sz]e|elaborate)\b",
    "list": r"\b(?:list|enumerate|examples|ideas|suggest|steps)\b",
    "story": r"\b(?:story|essay|article|blog|poem|letter|speech|chapter|novel|scene)\b",
    "role": r"\b(?:you are|imagine|pretend|act as|role|character)\b",
    "count": r"\b(?:how many|how much|total|each|calculate|what is the)\b",
    "short": r"\b(?:brief|briefly|short|concise|one word|one sentence|only|just|tl;?dr|yes or no)\b",
    "long": r"\b(?:detailed|comprehensive|in[- ]depth|thorough|complete|full|long|step[- ]by[- ]step)\b",
    "rewrite": r"\b(?:rewrite|translate|summari[sz]e|paraphrase|correct|fix|edit|convert|extract)\b",
    "choice": r"\b(?:which of|true or false|choose|classify|multiple[- ]choice|option)\b",
    "structure": r"\b(?:json|yaml|xml|csv|table|markdown|html)\b",
    "doc": r'"""|>>>|docstring',
}
_CUES = tuple(re.compile(pattern) for pattern in CUES.values())

NUMBERS = (
    "log_characters", "log_lines", "log_before", "log_system", "turns", "digits", "punctuation",
    "non_ascii", "questions", "ends_with_question", "log_asked", "is_asked", "log_word_length", *CUES,
)  # fmt: skip


def prompt_features(prompt: str, *, system: str = "", before: str = "", turns: int = 1) -> PromptFeatures:
    """Features of a prompt.

    Args:
        prompt: last user turn, or the whole prompt of a completion.
        system: system prompt.
        before: earlier turns, without the system prompt.
        turns: number of messages.
    """
    page = prompt if len(prompt) <= _HEAD + _TAIL else f"{prompt[:_HEAD]} {prompt[-_TAIL:]}"
    page = page.lower()
    words = _WORD.findall(page)
    count = max(1, len(words))
    asked = _asked_tokens(page)
    numbers = (
        log1p(len(prompt)),
        log1p(prompt.count("\n")),
        log1p(len(before)),
        log1p(len(system)),
        float(min(turns, 20)),
        sum(w.isdecimal() for w in words) / count,
        sum(len(w) == 1 and not w.isalnum() for w in words) / count,
        0.0 if page.isascii() else sum(c > "\x7f" for c in page) / len(page),
        float(min(page.count("?"), 10)),
        float(page.rstrip().endswith("?")),
        0.0 if asked is None else log1p(asked),
        float(asked is not None),
        log1p(len(page) / count),
        *(float(cue.search(page) is not None) for cue in _CUES),
    )
    return PromptFeatures(numbers, tuple(sorted({bucket(word) for word in _terms(words)})[:MOST_WORDS]))


def chat_features(messages: Sequence[Mapping[str, Any]]) -> PromptFeatures:
    """Features of a list of OpenAI chat messages; parts that are not text are ignored."""
    role_texts = [(str(message.get("role", "")), _text(message.get("content"))) for message in messages]
    last_user = next(
        (at for at in reversed(range(len(role_texts))) if role_texts[at][0] == "user"),
        len(role_texts) - 1,
    )
    return prompt_features(
        role_texts[last_user][1] if role_texts else "",
        system=" ".join(text for role, text in role_texts if role in ("system", "developer")),
        before=" ".join(
            t for role, t in role_texts[: max(0, last_user)] if role not in ("system", "developer")
        ),
        turns=len(role_texts),
    )


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text of the last user turn in a list of OpenAI chat messages."""
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    return _text(contents[-1]) if contents else ""


def bucket(term: str) -> int:
    """Hash bucket of a term, equal in every process (unlike `hash`)."""
    return crc32(term.encode("utf-8", "replace")) % BUCKETS


def _terms(words: Sequence[str]) -> Iterator[str]:
    """Words, the first 60 bigrams, and the first three words marked, since a prompt starts with its task."""
    yield from words
    for at in range(min(len(words) - 1, 60)):
        yield f"{words[at]} {words[at + 1]}"
    for word in words[:3]:
        yield f"^{word}"


def _asked_tokens(page: str) -> float | None:
    found = _LENGTH_ASKED.search(page)
    return None if found is None else int(found[1]) * _TOKENS_EACH[found[2].rstrip("s")]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return " ".join(part for part in parts if isinstance(part, str))
    return ""
