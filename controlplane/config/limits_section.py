"""Section `server.limits`: bounds of what a connection and a request may cost before and after admission."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Bytes, Milliseconds, Positive

# OpenAI's limit of the tokens in one embedding request.
_EMBEDDING_REQUEST_TOKENS = 300_000
# ASCII text has about 4 bytes per token, token ids up to 8 and escaped CJK text about 9.
_BYTES_PER_TOKEN = 16
# Of the members and list items that are no token ids.
_OTHER_VALUES = 100_000


@section(frozen=True, config=STRICT)
class LimitsSection:
    """Bounds of what a connection and a request may cost; beyond them the status is 400, 408, 413 or 431."""

    max_header_bytes: Annotated[Bytes, Field(ge=1_024)] = 64 * 2**10
    """Longest request line and headers together; 431 beyond it."""
    max_headers: Positive = 100
    """Most headers of a request; 431 beyond it."""
    header_timeout_ms: Milliseconds = 10_000
    """From the connection, or the first byte of a later request, to the end of the headers; 408 beyond it."""
    body_timeout_ms: Milliseconds = 60_000
    """From the end of the headers to the end of the body; 408 beyond it."""
    idle_timeout_ms: Milliseconds = 75_000
    """A connection without a request is closed after this time. Keep it above that of load balancers, which
    is often 60 s: a request may otherwise meet a connection that was just closed."""
    max_queue_delay_ms: Milliseconds = 50
    """Longest time that requests to the OpenAI endpoints wait for the event loop. If for 100 ms none waited
    less, those that waited longer are rejected before they are parsed, with `server.overload_status`."""
    max_body: Annotated[Bytes, Field(ge=1)] | None = None
    """Largest request body; a larger one is refused with status 413. By default 16 bytes for each token of
    the chat model's context, or of 300,000 tokens (OpenAI's longest embedding request) if that is more."""
    inline_body: Bytes = 64 * 2**10
    """A larger body is parsed in a thread, one at a time and tenants in turn; a smaller one at once."""
    body_memory: Annotated[Bytes, Field(ge=1)] = 128 * 2**20
    """Most bytes of all bodies together that are being read and parsed, and of what requests hold that wait
    or run: 8 bytes a token and the estimated size of the parsed body, with images as sent. A tenant has half
    of it at most, but one request in any case; what has up to `inline_body` bytes does not count. Beyond it a
    request is rejected with `server.overload_status`. Finished responses that clients have not read take as
    much again at most: beyond it the connections that have waited longest are closed."""
    max_depth: Positive = 64
    """Deepest nesting of lists and objects in a body."""
    max_members: Positive = 20_000
    """Members (name and value) of all objects of a body together."""
    max_values: Positive | None = None
    """Members and list items of a body together, token ids included; an empty list or object counts as two.
    By default 100,000 more than the tokens that `max_body` is derived from. A body that takes no token ids,
    as a chat, has at most `max_strings` of them."""
    max_strings: Positive = 100_000
    """Strings, lists and objects of a body together, names of members included. Building them keeps the event
    loop from all requests, for 40 ms with 380,000; token ids take a tenth of the time. A body that has a part
    of these may have the rest of `max_values` in other values: with half of them, half of the others."""
    max_name: Positive = 1_024
    """Longest member name, in bytes; looked at in bodies beyond `inline_body`."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Texts of more than 4,000 characters that are tokenized at once; tenants take turns, and with more than
    one thread no tenant has all of them."""
    max_images: Positive = 8
    """Most images of a request."""
    max_image_bytes: Annotated[Bytes, Field(ge=1)] = 16 * 2**20
    """Most bytes of all images of a request together, as files; in base64 they take a third more of
    `max_body`, which is less by default."""
    max_image_pixels: Positive = 2**22
    """Most pixels of all images of a request together, once for each choice of `n`; sizes are read from the
    files' headers before anything is decoded. A request that waits or runs keeps its processed images in the
    server's memory: 12 bytes a pixel, unless the model's processor makes them smaller."""
    max_answer_values: Positive = 262_144
    """Most tokens and alternatives in an answer with several choices or log probabilities:
    n * (1 + logprobs) * max_tokens. Without `max_tokens` the answer ends there. Also the most tokens that are
    tokenized or decoded for a client, but no fewer than the model's context."""
    max_pair_tokens: Positive = 2_097_152
    """Most tokens of all pairs in a rerank or score request; each pair repeats the query."""

    max_grammar: Annotated[Bytes, Field(ge=1)] = 64 * 2**10
    """Largest regular expression, grammar or list of choices of a structured output, in bytes."""
    max_schema: Annotated[Bytes, Field(ge=1)] = 512 * 2**10
    """Largest JSON schema of a structured output, or of tools whose calls are constrained, in bytes."""
    max_grammar_properties: Positive = 1_000
    """Most properties of one object of a schema."""
    max_grammar_choices: Positive = 5_000
    """Most choices, and most values of one `enum`, `anyOf` or `oneOf` of a schema."""
    max_grammar_repeat: Positive = 5_000
    """Largest repetition: `maxLength`, `maxItems` and the like, and `{m,n}` in a regular expression."""
    grammar_ms: Annotated[int, Field(ge=0, le=600_000)] = 10_000
    """Processor time that a grammar may take to compile. It is compiled in a process of its own before the
    engine compiles it again. 0 lets the engine compile unchecked, which is for trusted clients only."""
    grammar_step_ms: Positive = 100
    """Processor time that a grammar may take for one token of the output. The engine serves all requests of a
    step together, so that they all wait for the slowest."""
    grammar_memory: Annotated[Bytes, Field(ge=2**26)] = 128 * 2**20
    """Memory that a grammar may take to compile, with the stacks of the compiler's threads: for one of 5,000
    choices 47 MiB with a vocabulary of 128,000 tokens."""
    grammar_processes: Annotated[int, Field(ge=1, le=64)] = 2
    """Grammars that are compiled at once before the engine sees them; tenants take turns, and with more than
    one process no tenant has all of them."""

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
            shown = f"{value:,}".removesuffix(".0")
            yield f"server.limits.{key.name}: {shown}{source}"


def _longest_request(context_tokens: int) -> int:
    return max(context_tokens, _EMBEDDING_REQUEST_TOKENS)
