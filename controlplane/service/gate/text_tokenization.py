"""Tokenizes texts and conversations, and decodes token ids, for clients that count before they send.

Counts equal `usage.prompt_tokens` of the same request. Long texts are processed in threads, tenants in turn.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt
from controlplane.core.ports import Generator
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS, check_expansion
from controlplane.service.gate.chat_rendering import ChatRendering, rendering_length
from controlplane.service.gate.prompt_preparation import PromptTokenizer
from controlplane.service.gate.request_builder import RequestBuilder, named_backend
from controlplane.service.gate.request_limits import text_limit
from controlplane.service.request_jobs import Caller

# English has about four characters per token.
_LONG_TOKENS = LONG_TEXT_CHARACTERS // 4

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids, the tokenizer's strings of them if asked for, and the context of the model in tokens."""

    token_ids: Sequence[int]
    strings: Sequence[str] | None
    max_model_tokens: int


class TextTokenization:
    """Tokenization by the chat models; raises Refused naming the field of the body that is invalid."""

    def __init__(
        self,
        generators: Mapping[str, Generator],
        served: Iterable[Container[str]],
        requests: RequestBuilder,
        tokenizer: PromptTokenizer,
        chats: ChatRendering,
    ) -> None:
        """`generators` by each name that clients may send; `served` name all models, whatever their kind."""
        self._generators = generators
        self._served = served
        self._requests = requests
        self._tokenizer = tokenizer
        self._chats = chats

    async def text(
        self, caller: Caller, model: str | None, text: str, *, add_special_tokens: bool, has_strings: bool
    ) -> TokenizedPrompt:
        """Tokens of a text, which may exceed the context. Raises Refused, BackendDown."""
        generator = self._generator(model)
        # Bounds the time: a text with more characters than this exceeds the context for certain.
        text_limit(generator).check(len(text), param="prompt")

        def encode() -> Sequence[int]:
            check_expansion([text], param="prompt")
            return generator.codec.encode(text, add_special_tokens=add_special_tokens)

        token_ids = await self._run(caller, encode, is_long=len(text) > LONG_TEXT_CHARACTERS)
        self._check_answer(caller, generator, len(token_ids), param="prompt")
        return await self._with_strings(caller, generator, token_ids, has_strings=has_strings)

    async def chat(
        self, caller: Caller, model: str | None, prompt: ChatPrompt, *, has_strings: bool
    ) -> TokenizedPrompt:
        """Tokens of a conversation under the model's chat template. Raises Refused, BackendDown."""
        generator = self._generator(model)
        prompt = self._chats.opened(generator, prompt)
        render = partial(self._chats.render, generator, prompt)
        token_ids, _ = await self._tokenizer.in_turn(caller.tenant, rendering_length(prompt), render)
        return await self._with_strings(caller, generator, token_ids, has_strings=has_strings)

    async def decoded(self, caller: Caller, model: str | None, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises Refused, BackendDown."""
        generator = self._generator(model)
        codec = generator.codec
        self._check_answer(caller, generator, len(token_ids), param="tokens")
        highest = max(token_ids, default=0)
        if highest >= codec.vocabulary:
            raise Refused(
                f"tokens has the id {highest}; the highest of {generator.model} is "
                f"{codec.vocabulary - 1:,}. Use the model's own tokenizer.",
                param="tokens",
            )
        return await self._run(
            caller, partial(codec.decode, token_ids), is_long=len(token_ids) > _LONG_TOKENS
        )

    def _check_answer(self, caller: Caller, generator: Generator, tokens: int, *, param: str) -> None:
        """Raises Refused for more tokens than an answer may have, except those of a prompt of the model.

        An answer of millions of tokens takes hundreds of megabytes, and its encoding delays the event loop.
        """
        most = max(self._requests.terms_of(caller).max_answer_values, generator.max_model_tokens)
        if tokens > most:
            raise Refused(
                f"{param} has {tokens:,} tokens, and an answer at most {most:,} "
                "(server.limits.max_answer_values); send it in parts or raise the limit",
                param=param,
                code="answer_too_large",
            )

    async def _with_strings(
        self, caller: Caller, generator: Generator, token_ids: Sequence[int], *, has_strings: bool
    ) -> TokenizedPrompt:
        strings = None
        if has_strings:
            work = partial(generator.codec.strings, token_ids)
            strings = await self._run(caller, work, is_long=len(token_ids) > _LONG_TOKENS)
        return TokenizedPrompt(token_ids, strings, generator.max_model_tokens)

    async def _run(self, caller: Caller, work: Callable[[], _Result], *, is_long: bool) -> _Result:
        if not is_long:
            return work()
        return await self._tokenizer.slots.run(caller.tenant, partial(asyncio.to_thread, work))

    def _generator(self, model: str | None) -> Generator:
        return named_backend(self._generators, model, "tokenization", others=self._served)
