"""Calls that consist of several steps, without I/O, for both clients.

A workflow is a generator: it yields HTTP calls and calls of the caller's functions, and is sent their
results. An exception of a step ends it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from controlplane.sdk.api_calls import HttpCall, chat_call, embed_call, message_list, rerank_call
from controlplane.sdk.call_options import Messages, Options
from controlplane.sdk.errors import InvalidOutput, TooManyTurns
from controlplane.sdk.python_tools import as_content, python_tools, requested_call
from controlplane.sdk.replies import ChatReply

Result = TypeVar("Result")
Output = TypeVar("Output", bound=BaseModel)
Step = HttpCall[Any] | Callable[[], Any]
Workflow = Generator[Step, Any, Result]

Retrieve = Callable[[npt.NDArray[np.float32]], Any]
"""Returns the passages, strings, that are nearest to a vector [dimensions]; may be a coroutine function."""

# Shares of a deadline (decision 0046): told all that remains, a server lets the first stages take it.
_SHARES = {"embed": 0.05, "rerank": 0.25, "chat": 0.70}
_OF_EACH_STAGE = ("service_class", "timeout", "traceparent")
INSTRUCTIONS = "Answer the question from the passages. If they do not contain the answer, say so."


@dataclass(frozen=True, slots=True)
class ToolRun:
    """The end of a conversation with tools: the last reply, and all messages, which include the results."""

    reply: ChatReply
    messages: Sequence[Mapping[str, Any]]

    @property
    def text(self) -> str:
        """The text of the last reply."""
        return self.reply.text


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer from passages, with the milliseconds of each stage: embed, retrieve, rerank and chat."""

    text: str
    passages: Sequence[str]
    stage_ms: Mapping[str, float]
    reply: ChatReply


def _sent(call: HttpCall[Result]) -> Workflow[Result]:
    """One HTTP call as a step; gives its result the type that `yield` loses."""
    reply: Result = yield call
    return reply


def parse_workflow(
    model: str, messages: Messages, output: type[Output], options: Options
) -> Workflow[Output]:
    """A chat whose output has the schema of a pydantic model."""
    schema = {"name": output.__name__, "schema": output.model_json_schema(), "strict": True}
    asked = {**options, "response_format": {"type": "json_schema", "json_schema": schema}}
    reply = yield from _sent(chat_call(model, messages, asked))
    try:
        return output.model_validate_json(reply.text)
    except ValidationError as error:
        why = (
            "it was cut off at the largest number of tokens; raise max_tokens"
            if reply.finish_reason == "length"
            else str(error)
        )
        raise InvalidOutput(f"the output is not a valid {output.__name__}: {why}", reply.text) from error


def tool_workflow(
    model: str,
    messages: Messages,
    functions: Sequence[Callable[..., Any]],
    max_turns: int,
    options: Options,
) -> Workflow[ToolRun]:
    """A chat that calls functions until the model answers without a call."""
    if max_turns < 1:
        raise ValueError(f"max_turns={max_turns}: should be at least 1; change it")
    tools = python_tools(functions)
    conversation = message_list(messages)
    asked = {**options, "tools": [tool.described for tool in tools.values()]}
    for _ in range(max_turns):
        reply = yield from _sent(chat_call(model, conversation, asked))
        conversation.append(reply.message)
        if not reply.tool_calls:
            return ToolRun(reply, conversation)
        for call in reply.tool_calls:
            result = yield requested_call(tools, call)
            content = as_content(result)
            conversation.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        # A call that is forced once would be forced in each turn.
        if asked.get("tool_choice") not in (None, "none"):
            asked["tool_choice"] = "auto"
    raise TooManyTurns(
        f"the model still calls functions after max_turns={max_turns}; raise it or change the prompt",
        conversation,
    )


def answer_workflow(
    question: str,
    *,
    retrieve: Retrieve,
    model: str,
    embedding_model: str,
    rerank_model: str | None,
    top_n: int,
    prompt_name: str | None,
    instructions: str,
    options: Options,
) -> Workflow[Answer]:
    """Retrieval-augmented generation: embed the question, retrieve, rerank if asked, and chat."""
    shared = {key: options[key] for key in _OF_EACH_STAGE if key in options}
    prompt = {} if prompt_name is None else {"prompt_name": prompt_name}
    stage_ms: dict[str, float] = {}
    began = perf_counter()

    def end(stage: str) -> None:
        nonlocal began
        now = perf_counter()
        stage_ms[stage], began = (now - began) * 1000, now

    def part(*to_come: str) -> float:
        return _SHARES[to_come[0]] / sum(_SHARES[stage] for stage in to_come)

    embed = embed_call(embedding_model, question, {**shared, **prompt})
    later = ("chat",) if rerank_model is None else ("rerank", "chat")
    embedded = yield from _sent(replace(embed, stated_part=part("embed", *later)))
    end("embed")
    found = yield lambda: retrieve(embedded.vectors[0])
    passages = list(found)
    end("retrieve")
    if rerank_model is not None and passages:
        best = {**shared, "top_n": min(top_n, len(passages))}
        rerank = rerank_call(rerank_model, question, passages, best)
        ranked = yield from _sent(replace(rerank, stated_part=part("rerank", "chat")))
        passages = ranked.texts
        end("rerank")
    passages = passages[:top_n]
    reply = yield from _sent(chat_call(model, _grounded(question, passages, instructions), options))
    end("chat")
    return Answer(reply.text, passages, stage_ms, reply)


def _grounded(question: str, passages: Sequence[str], instructions: str) -> list[Mapping[str, Any]]:
    numbered = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, start=1))
    asked = f"Passages:\n\n{numbered or '(none)'}\n\nQuestion: {question}"
    return [{"role": "system", "content": instructions}, {"role": "user", "content": asked}]
