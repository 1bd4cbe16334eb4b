"""Section `server.limits`: bounds of what one request may cost before and after its admission."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Bytes, Positive

# OpenAI's limit of the tokens in one embedding request.
_EMBEDDING_REQUEST_TOKENS = 300_000
# ASCII text has about 4 bytes per token, token ids up to 8 and escaped CJK text about 9.
_BYTES_PER_TOKEN = 16
# Of the members and list items that are no token ids.
_OTHER_VALUES = 100_000


@section(frozen=True, config=STRICT)
class LimitsSection:
    """Bounds of what one request may cost. A larger request is refused with status 400 or 413."""

    max_body: Annotated[Bytes, Field(ge=1)] | None = None
    """Largest request body; a larger one is refused with status 413. By default 16 bytes for each token of
    the chat model's context, or of 300,000 tokens (OpenAI's longest embedding request) if that is more."""
    inline_body: Bytes = 64 * 2**10
    """A larger body is parsed in a thread, one at a time and tenants in turn; a smaller one at once."""
    max_depth: Positive = 64
    """Deepest nesting of lists and objects in a body."""
    max_members: Positive = 20_000
    """Members (name and value) of all objects of a body together."""
    max_values: Positive | None = None
    """Members and list items of a body together, token ids included. By default 100,000 more than the
    tokens that `max_body` is derived from."""
    max_name: Positive = 1_024
    """Longest member name in a body, in bytes."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Texts of more than 4,000 characters that are tokenized at once; tenants take turns, and with more than
    one thread no tenant has all of them."""
    max_answer_values: Positive = 262_144
    """Most tokens and alternatives in an answer with several choices or log probabilities:
    n * (1 + logprobs) * max_tokens. Without `max_tokens` the answer ends there."""

    def body_bytes(self, context_tokens: int) -> int:
        """The largest body where the chat model's context has so many tokens (0: no chat model)."""
        return self.max_body or _BYTES_PER_TOKEN * _longest_request(context_tokens)

    def body_values(self, context_tokens: int) -> int:
        """The most values of a body where the chat model's context has so many tokens."""
        return self.max_values or _longest_request(context_tokens) + _OTHER_VALUES

    def lines(self, context_tokens: int) -> Iterator[str]:
        """One line for each limit, those that follow from the context included."""
        found = {"max_body": self.body_bytes(context_tokens), "max_values": self.body_values(context_tokens)}
        for key in fields(self):
            value, source = getattr(self, key.name), ""
            if value is None:
                value, source = found[key.name], " (by default)"
            yield f"server.limits.{key.name}: {value:,}{source}"


def _longest_request(context_tokens: int) -> int:
    return max(context_tokens, _EMBEDDING_REQUEST_TOKENS)
