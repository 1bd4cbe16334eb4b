"""The asyncio client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from inspect import isawaitable
from typing import Any, Unpack

import httpx

from controlplane.sdk.api_calls import (
    HttpCall,
    Reply,
    chat_call,
    completion_call,
    embed_call,
    http_options,
    models_call,
    ready_call,
    rerank_call,
    tokenize_call,
)
from controlplane.sdk.bulk_embedding import (
    BATCH_TOKENS,
    MAX_CONCURRENCY,
    BulkEmbedding,
    EmbeddedBatch,
    OnRefused,
    OpenBatch,
)
from controlplane.sdk.call_options import (
    CallOptions,
    ChatOptions,
    EmbedOptions,
    GenerationOptions,
    Inputs,
    Messages,
    RerankOptions,
    TokenizeOptions,
    ToolOptions,
)
from controlplane.sdk.chat_stream import Streamed
from controlplane.sdk.deadline import current_deadline, time_limit
from controlplane.sdk.errors import NOT_READY, DeadlineExceeded
from controlplane.sdk.replies import (
    ChatReply,
    Completion,
    Embeddings,
    Readiness,
    RerankedDocuments,
    ServedModel,
    TokenizedText,
)
from controlplane.sdk.retries import DEFAULT_RETRIES, NO_RETRIES, Attempts, Retries
from controlplane.sdk.workflows import (
    INSTRUCTIONS,
    Answer,
    Output,
    Result,
    Retrieve,
    ToolRun,
    Workflow,
    answer_workflow,
    parse_workflow,
    tool_workflow,
)


class AsyncTextStream(Streamed, AbstractAsyncContextManager["AsyncTextStream"]):
    """Iterates over the text of a streamed chat, which begins with the iteration or with `async with`.

    Closing it early aborts the request. Iteration raises StreamLost if the stream breaks before the response
    is complete, and DeadlineExceeded if the deadline passes.
    """

    def __init__(
        self, call: HttpCall[ChatReply], open_response: Callable[[HttpCall[Any]], Awaitable[httpx.Response]]
    ) -> None:
        super().__init__(call)
        self._open_response = open_response

    async def __aiter__(self) -> AsyncIterator[str]:
        response = await self._begun()
        pieces = response.aiter_bytes()
        try:
            while (received := await self._received(pieces)) is not None:
                for text in self._events.read(received):
                    yield text
        except DeadlineExceeded as error:
            error.text = self._events.text
            raise
        except httpx.TransportError as error:
            raise self._lost(error) from error
        finally:
            await self.aclose()
        self._events.end()

    async def _received(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        async with time_limit(self._deadline, self._call.path):
            return await anext(pieces, None)

    async def _begun(self) -> httpx.Response:
        if self._response is None:
            async with time_limit(self._deadline, self._call.path):
                self._response = await self._open_response(self._call)
            self._events.begin(self._response.headers)
        return self._response

    async def aclose(self) -> None:
        """Closes the connection, which aborts an unfinished request."""
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> "AsyncTextStream":
        await self._begun()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class AsyncTandem(AbstractAsyncContextManager["AsyncTandem"]):
    """A client with a connection pool: close it, or use it in `async with`.

    Every method raises a subclass of TandemError. Cancelling a call aborts its request. Event loops may use
    it one after another, as with `asyncio.run`; close it in the last one.

    Args:
        base_url: address of the server, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: longest time in seconds without a byte from the server.
        retries: how often and after which delay a call is repeated of which no response arrived.
        transport: replaces httpx's network transport.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: Retries = DEFAULT_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._retries = retries
        self._options = {**http_options(base_url, api_key, timeout), "transport": transport}
        self._http = httpx.AsyncClient(**self._options)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def chat(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> ChatReply:
        """Returns a complete chat response; a plain string is one user message."""
        return await self._send(chat_call(model, messages, options))

    def stream(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> AsyncTextStream:
        """Returns a stream of the chat's text: `async for text in tandem.stream(...)`."""
        return AsyncTextStream(chat_call(model, messages, options, is_streamed=True), self._open_response)

    async def complete(
        self, prompt: str | Sequence[int], *, model: str, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Continues a text or a list of token ids, without the model's chat template."""
        return await self._send(completion_call(model, prompt, options))

    async def parse(
        self, messages: Messages, output: type[Output], *, model: str, **options: Unpack[GenerationOptions]
    ) -> Output:
        """Returns the chat's output as an instance of a pydantic model class, whose schema constrains it.

        Raises InvalidOutput if the output does not fit the schema, for example because it was cut off.
        """
        return await self._run(parse_workflow(model, messages, output, options))

    async def run_tools(
        self,
        messages: Messages,
        functions: Sequence[Callable[..., Any]],
        *,
        model: str,
        max_turns: int = 8,
        **options: Unpack[ToolOptions],
    ) -> ToolRun:
        """Lets the model call Python functions, also asynchronous ones, until it answers without a call.

        A function's name, docstring and annotations describe it to the model. Its result is sent back as it
        is (a string) or as JSON. The model is told of invalid arguments; an exception of a function is
        raised. Raises TooManyTurns if the model still calls functions in response number `max_turns`.
        """
        return await self._run(tool_workflow(model, messages, functions, max_turns, options))

    async def embed(self, inputs: Inputs, *, model: str, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns one vector per input; at most 2,048 inputs."""
        return await self._send(embed_call(model, inputs, options))

    def embed_many(
        self,
        texts: Iterable[str],
        *,
        model: str,
        start: int = 0,
        batch_tokens: int = BATCH_TOKENS,
        max_concurrency: int = MAX_CONCURRENCY,
        progress: Callable[[int], object] | None = None,
        on_refused: OnRefused | None = None,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[EmbeddedBatch]:
        """Embeds any number of texts and yields them in order, in batches with their vectors.

        The number of open calls follows the server: it grows while calls succeed and falls by an eighth when
        one is refused. A refused batch is sent again after the server's Retry-After, as often as necessary
        within a deadline. Texts are read as they are needed. Another error is raised after all earlier
        batches; `start`, the `stop` of the last batch, continues there.

        Args:
            texts: the texts; an iterator is consumed.
            model: the embedding model.
            start: number of texts to skip.
            batch_tokens: estimated tokens of a batch; a longer text is a batch of its own.
            max_concurrency: limit of open calls.
            progress: is called with the number of texts of each embedded batch, like `tqdm(...).update`.
            on_refused: is called with the number and the error of each text that the server refuses, such as
                an empty one. The text is left out: no batch has it. Without it such an error is raised.
            options: as of `embed`.
        """
        run = BulkEmbedding(
            texts, model, options, self._retries, start, batch_tokens, max_concurrency, progress, on_refused
        )
        return self._embed_batches(run)

    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str, **options: Unpack[RerankOptions]
    ) -> RerankedDocuments:
        """Orders documents by their relevance to a query."""
        return await self._send(rerank_call(model, query, documents, options))

    async def answer(
        self,
        question: str,
        *,
        retrieve: Retrieve,
        model: str,
        embedding_model: str,
        rerank_model: str | None = None,
        top_n: int = 4,
        prompt_name: str | None = None,
        instructions: str = INSTRUCTIONS,
        **options: Unpack[GenerationOptions],
    ) -> Answer:
        """Answers a question from retrieved passages: embed, retrieve, rerank and chat.

        In `with deadline(ms=...)` all stages share the deadline, of which the first ones state a small part.

        Args:
            question: the question.
            retrieve: returns the passages nearest to the question's vector [dimensions]; may be asynchronous.
            model: the chat model.
            embedding_model: the embedding model.
            rerank_model: orders the passages before the best are used; without it they are used as retrieved.
            top_n: number of passages to use.
            prompt_name: the embedding model's prompt for queries, such as "query".
            instructions: the system message.
            options: of the chat; `service_class`, `timeout` and `traceparent` apply to each stage.
        """
        return await self._run(
            answer_workflow(
                question,
                retrieve=retrieve,
                model=model,
                embedding_model=embedding_model,
                rerank_model=rerank_model,
                top_n=top_n,
                prompt_name=prompt_name,
                instructions=instructions,
                options=options,
            )
        )

    async def tokenize(
        self, text: Messages, *, model: str, **options: Unpack[TokenizeOptions]
    ) -> TokenizedText:
        """Returns the token ids of a text, or of a conversation in the model's chat template."""
        return await self._send(tokenize_call(model, text, options))

    async def models(self, **options: Unpack[CallOptions]) -> Sequence[ServedModel]:
        """Returns the served models."""
        return await self._send(models_call(options))

    async def ready(self, **options: Unpack[CallOptions]) -> Readiness:
        """Returns whether every engine answers. No retries.

        A server that cannot be reached is not ready, nor is another service that answers in its place.
        """
        try:
            return await self._send(ready_call(options), NO_RETRIES)
        except NOT_READY as error:
            return Readiness(is_ready=False, reason=str(error))

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _run(self, workflow: Workflow[Result]) -> Result:
        outcome: Any = None
        while True:
            try:
                step = workflow.send(outcome)
            except StopIteration as end:
                result: Result = end.value
                return result
            outcome = await self._send(step) if isinstance(step, HttpCall) else step()
            if isawaitable(outcome):
                async with time_limit(current_deadline(), "function"):
                    outcome = await outcome

    async def _embed_batches(self, run: BulkEmbedding) -> AsyncIterator[EmbeddedBatch]:
        clock = asyncio.get_running_loop().time
        calls: dict[asyncio.Task[Embeddings], OpenBatch] = {}
        try:
            while not run.is_complete:
                for batch, call in run.due(clock()):
                    calls[asyncio.create_task(self._send(call, NO_RETRIES))] = batch
                wait_s = run.wait_s(clock())
                if calls:
                    await asyncio.wait(calls, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                elif wait_s is not None:
                    await asyncio.sleep(wait_s)
                for task in [task for task in calls if task.done()]:
                    run.settle(calls.pop(task), task.exception() or task.result(), clock())
                for embedded in run.finished():
                    yield embedded
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _send(self, call: HttpCall[Reply], retries: Retries | None = None) -> Reply:
        async with time_limit(call.deadline, call.path):
            response = await self._open_response(call, retries)
            try:
                await response.aread()
            except httpx.TransportError as error:
                raise call.cut_off(error) from error
            finally:
                await response.aclose()
        return call.result(response)

    async def _open_response(self, call: HttpCall[Any], retries: Retries | None = None) -> httpx.Response:
        """Sends the call, with retries, and returns the response before its body is read."""
        attempts = Attempts(retries or self._retries, call.path, call.deadline)
        http = self._client()
        while True:
            try:
                response = await http.send(call.request(http), stream=True)
                if response.is_success:
                    return response
                await response.aread()
                wait_s = attempts.after_refusal(response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error)
            await asyncio.sleep(wait_s)

    def _client(self) -> httpx.AsyncClient:
        """The client with the connections of the running event loop; those of another one cannot be used."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop) and not self._http.is_closed:
            self._http = httpx.AsyncClient(**self._options)
        self._loop = loop
        return self._http
