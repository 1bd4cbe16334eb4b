"""The blocking client."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
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


class TextStream(Streamed, AbstractContextManager["TextStream"]):
    """Iterates over the text of a streamed chat, which begins with the iteration or with `with`.

    Closing it early aborts the request. Iteration raises StreamLost if the stream breaks before the response
    is complete, and DeadlineExceeded if the deadline passes.
    """

    def __init__(
        self, call: HttpCall[ChatReply], open_response: Callable[[HttpCall[Any]], httpx.Response]
    ) -> None:
        super().__init__(call)
        self._open_response = open_response

    def __iter__(self) -> Iterator[str]:
        response = self._begun()
        try:
            for received in response.iter_bytes():
                yield from self._events.read(received)
                if self._deadline is not None:
                    self._deadline.check(self._call.path)
        except DeadlineExceeded as error:
            error.text = self._events.text
            raise
        except httpx.TransportError as error:
            raise self._lost(error) from error
        finally:
            self.close()
        self._events.end()

    def _begun(self) -> httpx.Response:
        if self._response is None:
            self._response = self._open_response(self._call)
            self._events.begin(self._response.headers)
        return self._response

    def close(self) -> None:
        """Closes the connection, which aborts an unfinished request."""
        if self._response is not None:
            self._response.close()

    def __enter__(self) -> "TextStream":
        self._begun()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Tandem(AbstractContextManager["Tandem"]):
    """A client with a connection pool: close it, or use it in `with`. Threads may share it.

    Every method raises a subclass of TandemError.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retries = retries
        self._http = httpx.Client(**http_options(base_url, api_key, timeout), transport=transport)

    def chat(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> ChatReply:
        """Returns a complete chat response; a plain string is one user message."""
        return self._send(chat_call(model, messages, options))

    def stream(self, messages: Messages, *, model: str, **options: Unpack[ChatOptions]) -> TextStream:
        """Returns a stream of the chat's text: `for text in tandem.stream(...)`."""
        return TextStream(chat_call(model, messages, options, is_streamed=True), self._open_response)

    def complete(
        self, prompt: str | Sequence[int], *, model: str, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Continues a text or a list of token ids, without the model's chat template."""
        return self._send(completion_call(model, prompt, options))

    def parse(
        self, messages: Messages, output: type[Output], *, model: str, **options: Unpack[GenerationOptions]
    ) -> Output:
        """Returns the chat's output as an instance of a pydantic model class, whose schema constrains it.

        Raises InvalidOutput if the output does not fit the schema, for example because it was cut off.
        """
        return self._run(parse_workflow(model, messages, output, options))

    def run_tools(
        self,
        messages: Messages,
        functions: Sequence[Callable[..., Any]],
        *,
        model: str,
        max_turns: int = 8,
        **options: Unpack[ToolOptions],
    ) -> ToolRun:
        """Lets the model call Python functions until it answers without a call.

        A function's name, docstring and annotations describe it to the model. Its result is sent back as it
        is (a string) or as JSON. The model is told of invalid arguments; an exception of a function is
        raised. Raises TooManyTurns if the model still calls functions in response number `max_turns`.
        """
        return self._run(tool_workflow(model, messages, functions, max_turns, options))

    def embed(self, inputs: Inputs, *, model: str, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns one vector per input; at most 2,048 inputs."""
        return self._send(embed_call(model, inputs, options))

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
    ) -> Iterator[EmbeddedBatch]:
        """Embeds any number of texts and yields them in order, in batches with their vectors.

        The number of open calls follows the server: it grows while calls succeed and falls by an eighth when
        one is refused. A refused batch is sent again after the server's Retry-After, as often as necessary
        within a deadline. Texts are read as they are needed. Another error is raised after all earlier
        batches; `start`, the `stop` of the last batch, continues there. Leaving the loop early does not wait
        for the open calls; the server still computes them.

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

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str, **options: Unpack[RerankOptions]
    ) -> RerankedDocuments:
        """Orders documents by their relevance to a query."""
        return self._send(rerank_call(model, query, documents, options))

    def answer(
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
            retrieve: returns the passages nearest to the question's vector [dimensions].
            model: the chat model.
            embedding_model: the embedding model.
            rerank_model: orders the passages before the best are used; without it they are used as retrieved.
            top_n: number of passages to use.
            prompt_name: the embedding model's prompt for queries, such as "query".
            instructions: the system message.
            options: of the chat; `service_class`, `timeout` and `traceparent` apply to each stage.
        """
        return self._run(
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

    def tokenize(self, text: Messages, *, model: str, **options: Unpack[TokenizeOptions]) -> TokenizedText:
        """Returns the token ids of a text, or of a conversation in the model's chat template."""
        return self._send(tokenize_call(model, text, options))

    def models(self, **options: Unpack[CallOptions]) -> Sequence[ServedModel]:
        """Returns the served models."""
        return self._send(models_call(options))

    def ready(self, **options: Unpack[CallOptions]) -> Readiness:
        """Returns whether every engine answers. No retries.

        A server that cannot be reached is not ready, nor is another service that answers in its place.
        """
        try:
            return self._send(ready_call(options), NO_RETRIES)
        except NOT_READY as error:
            return Readiness(is_ready=False, reason=str(error))

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, workflow: Workflow[Result]) -> Result:
        outcome: Any = None
        while True:
            try:
                step = workflow.send(outcome)
            except StopIteration as end:
                result: Result = end.value
                return result
            outcome = self._send(step) if isinstance(step, HttpCall) else step()
            if isawaitable(outcome):
                raise TypeError("a function returned an awaitable; use AsyncTandem or a blocking function")

    def _embed_batches(self, run: BulkEmbedding) -> Iterator[EmbeddedBatch]:
        calls: dict[Future[Embeddings], OpenBatch] = {}
        threads = ThreadPoolExecutor(run.max_concurrency, "tandem-embed")
        try:
            while not run.is_complete:
                for batch, call in run.due(time.monotonic()):
                    calls[threads.submit(self._send, call, NO_RETRIES)] = batch
                wait_s = run.wait_s(time.monotonic())
                if calls:
                    wait(calls, wait_s, FIRST_COMPLETED)
                elif wait_s is not None:
                    time.sleep(wait_s)
                for future in [future for future in calls if future.done()]:
                    outcome = future.exception() or future.result()
                    run.settle(calls.pop(future), outcome, time.monotonic())
                yield from run.finished()
        finally:
            # A thread that waits for a response cannot be interrupted.
            threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, call: HttpCall[Reply], retries: Retries | None = None) -> Reply:
        response = self._open_response(call, retries)
        try:
            response.read()
        except httpx.TransportError as error:
            raise call.cut_off(error) from error
        finally:
            response.close()
        return call.result(response)

    def _open_response(self, call: HttpCall[Any], retries: Retries | None = None) -> httpx.Response:
        """Sends the call, with retries, and returns the response before its body is read."""
        attempts = Attempts(retries or self._retries, call.path, call.deadline)
        while True:
            try:
                response = self._http.send(call.request(self._http), stream=True)
                if response.is_success:
                    return response
                response.read()
                wait_s = attempts.after_refusal(response)
            except httpx.TransportError as error:
                wait_s = attempts.after_loss(error)
            time.sleep(wait_s)
