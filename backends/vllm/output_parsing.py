"""Splits generated text into reasoning, content and tool calls with vLLM's own parsers.

A conversation that needs parsing gets a `ParsedConversation`. It holds the sampling constraints and one
streaming parser per sample, which splits the text into reasoning, content and OpenAI's tool-call deltas, in
this order. Forced calls (`required`, or one function by name) are constrained by a grammar to the schema of
their tool; a grammar applies only after the reasoning has ended.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, TypeVar

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager

from backends.vllm.compat import CLIENT_ERRORS
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, Delta

Result = TypeVar("Result")

_TOOL_KEY = "models.chat.tool_parser"
_REASONING_KEY = "models.chat.reasoning_parser"
# Members by which a schema says what it admits.
_SCHEMA_KINDS = {"type", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"}


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ValueError for a parser name that vLLM does not register."""
    for key, name, registry in (
        (_TOOL_KEY, tool_parser, ToolParserManager),
        (_REASONING_KEY, reasoning_parser, ReasoningParserManager),
    ):
        known = registry.list_registered()
        if name is not None and name not in known:
            raise ValueError(f"{key}={name}: unknown to vLLM; choose one of {', '.join(known)}")


def _strictness(level: str) -> dict[str, str]:
    """The argument of vLLM's parsers for a level. Raises ValueError if this release has no levels."""
    if level == "auto":
        return {}
    if "tool_strict_level" not in signature(ParserManager.get_parser).parameters:
        raise ValueError(
            f"models.chat.tool_strictness={level}: this release of vLLM has no levels; remove it"
        )
    return {"tool_strict_level": level}


class OutputParser:
    """Tool-call and reasoning parsers of one model.

    `grammar_options` are the arguments of AsyncLLM.generate that say when a grammar begins to apply, for
    output that is not parsed: at once, since it has no reasoning.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tokenizer: Any,
        model_config: Any,
        tool_strictness: str,
    ) -> None:
        self._turn = asyncio.Lock()
        self._has_tool_parser = tool_parser is not None
        self._has_reasoning_parser = reasoning_parser is not None
        self.grammar_options: dict[str, Any] = {"reasoning_ended": True} if self._has_reasoning_parser else {}
        is_harmony = self._has_reasoning_parser and model_config.hf_config.model_type == "gpt_oss"
        self._parser_class = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            model_name=model_config.model,
            **_strictness(tool_strictness),
            **({"is_harmony": True} if is_harmony else {}),
        )
        self._tokenizer = tokenizer
        self._model_config = model_config

    async def async_begin(
        self,
        chat: ChatPrompt | None,
        structure: StructuredOutputsParams | None,
        prompt: Sequence[int],
        *,
        resumed_tokens: int = 0,
    ) -> "ParsedConversation | None":
        """`begin` in an iteration of the event loop of its own if it is costly."""
        begin = partial(self.begin, chat, structure, prompt, resumed_tokens=resumed_tokens)
        return await self._in_turn(chat, structure, begin)

    async def async_constraint(
        self, chat: ChatPrompt | None, structure: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """`constraint` in an iteration of the event loop of its own if it is costly."""
        return await self._in_turn(chat, structure, partial(self.constraint, chat, structure))

    async def _in_turn(
        self,
        chat: ChatPrompt | None,
        structure: StructuredOutputsParams | None,
        work: Callable[[], Result],
    ) -> Result:
        if chat is None or not (chat.tools or structure):
            return work()
        # Tools of 1,000 properties take 10 ms. Requests that one step of the engine answers come back
        # together; without turns the loop would do nothing else until it has converted the tools of all.
        async with self._turn:
            await asyncio.sleep(0)
            return work()

    def begin(
        self,
        chat: ChatPrompt | None,
        structure: StructuredOutputsParams | None,
        prompt: Sequence[int],
        *,
        resumed_tokens: int = 0,
    ) -> "ParsedConversation | None":
        """Starts parsing a conversation; None if it needs no parsing.

        The last `resumed_tokens` of the prompt were generated before a preemption and are parsed first.
        Raises Refused.
        """
        if chat is None or not self._is_parsed(chat):
            return None
        request = _vllm_request(chat, structure)
        first_resumed = len(prompt) - resumed_tokens
        conversation = ParsedConversation(request, prompt[:first_resumed], self._parser)
        if generated := prompt[first_resumed:]:
            text = self._tokenizer.decode(generated, skip_special_tokens=conversation.skip_special_tokens)
            conversation.catch_up(text, generated)
        return conversation

    def constraint(
        self, chat: ChatPrompt | None, structure: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """The constraint that the engine gets: `structure`, or that of the calls that the request demands.

        Raises Refused.
        """
        if chat is None or not self._is_parsed(chat) or not (chat.tools or structure):
            return structure
        # Only the ids of calls depend on the messages.
        request = _vllm_request(replace(chat, messages=()), structure)
        return self._parser(request).adjust_request(request).structured_outputs

    def _is_parsed(self, chat: ChatPrompt) -> bool:
        """Whether the output has parts to split. Raises Refused for calls that this server cannot parse."""
        if not chat.tools and chat.tool_choice not in ("auto", "none"):
            raise Refused(f"tool_choice {chat.tool_choice!r} needs tools; add them", param="tools")
        offers = bool(chat.tools) and chat.tool_choice != "none"
        if offers and not self._has_tool_parser:
            raise Refused(
                f"this server parses no tool calls; its operator must set {_TOOL_KEY} to the parser of the "
                "model's call format (for example hermes, llama3_json or mistral)",
                param="tools",
            )
        return offers or self._has_reasoning_parser

    def _parser(self, request: ChatCompletionRequest) -> Any:
        assert self._parser_class
        return self._parser_class(
            self._tokenizer,
            request.tools,
            model_config=self._model_config,
            chat_template_kwargs=dict(request.chat_template_kwargs or {}),
        )


class ParsedConversation:
    """Streaming parsers of one request, one per sample, and the sampling constraints they imply.

    `grammar_options` are the arguments of AsyncLLM.generate that say when a grammar begins to apply.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        prompt: Sequence[int],
        make_parser: Callable[[ChatCompletionRequest], Any],
    ) -> None:
        self._prompt = list(prompt)
        self._make_parser = make_parser
        first = make_parser(request)
        self._parsers = {0: first}
        self._samples_with_calls: set[int] = set()
        self._request = request = first.adjust_request(request)
        self.structured_outputs: StructuredOutputsParams | None = request.structured_outputs
        self.skip_special_tokens: bool = request.skip_special_tokens
        self.grammar_options: dict[str, Any] = {}
        # Only with a grammar, because `is_reasoning_end` searches the whole prompt.
        if first.reasoning_parser is not None and self.structured_outputs is not None:
            # Some grammars contain a rule for the reasoning.
            has_rule = getattr(request, "_grammar_from_parser", False)
            self.grammar_options = {
                "reasoning_ended": has_rule or first.is_reasoning_end(self._prompt),
                "reasoning_parser_kwargs": {"chat_template_kwargs": dict(request.chat_template_kwargs or {})},
            }

    def catch_up(self, text: str, token_ids: Sequence[int]) -> None:
        """Parses output that the client has already received for the first sample."""
        self._parse(0, text, token_ids, finished=False)

    def read(self, delta: Delta) -> Delta:
        """Returns the delta with its text split into reasoning, content and tool calls."""
        reason = delta.finish_reason
        # A preempted request resumes, so a parser that buffers part of a tag keeps waiting for the rest.
        finished = reason not in (None, "preempted")
        message = self._parse(delta.index, delta.text, delta.token_ids, finished=finished)
        if message is None:
            calls, reasoning, text = (), "", ""
        else:
            calls = tuple(call.model_dump(exclude_none=True) for call in message.tool_calls or ())
            reasoning, text = message.reasoning or "", message.content or ""
        if calls:
            self._samples_with_calls.add(delta.index)
        return replace(
            delta,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=self._finish_reason(delta.index, reason),
        )

    def _parse(self, index: int, text: str, token_ids: Sequence[int], *, finished: bool) -> Any:
        if index not in self._parsers:
            self._parsers[index] = self._make_parser(self._request)
        parser = self._parsers[index]
        return parser.parse_delta(text, list(token_ids), self._request, self._prompt, finished=finished)

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        """Returns "tool_calls" if the model chose to call, "stop" if the request named the call."""
        model_chose = isinstance(self._request.tool_choice, str)
        return (
            "tool_calls" if reason == "stop" and model_chose and index in self._samples_with_calls else reason
        )


def _vllm_request(chat: ChatPrompt, structure: StructuredOutputsParams | None) -> ChatCompletionRequest:
    names = [tool.get("function", {}).get("name") for tool in chat.tools]
    if not isinstance(chat.tool_choice, str):
        chosen = chat.tool_choice.get("function", {}).get("name")
        if chosen not in names:
            raise Refused(
                f"tool_choice names {chosen!r}, which is not among the tools {names}", param="tool_choice"
            )
    # Only the ids of calls depend on earlier messages, and a conversation may be long.
    calling = {
        "messages": [dict(message) for message in chat.messages],
        "tools": [
            _constrained(tool, is_forced=chat.tool_choice not in ("auto", "none")) for tool in chat.tools
        ],
        "tool_choice": chat.tool_choice,
    }
    try:
        return ChatCompletionRequest(
            structured_outputs=structure,
            chat_template_kwargs=dict(chat.template_options),
            **(calling if chat.tools else {"messages": []}),
        )
    except CLIENT_ERRORS as error:
        raise Refused(f"tools: {_reason(error)}", param="tools") from error


def _constrained(tool: Mapping[str, Any], *, is_forced: bool) -> dict[str, Any]:
    """The tool with a schema that admits objects only; a tool that `is_forced` is strict.

    vLLM leaves the arguments of other tools free: they may be any JSON value.
    """
    function = dict(tool.get("function") or {})
    parameters = function.get("parameters") or {}
    if not _SCHEMA_KINDS & parameters.keys():
        function["parameters"] = {"type": "object", **parameters}
    return {**tool, "function": function | ({"strict": True} if is_forced else {})}


def _reason(error: Exception) -> str:
    """The first field error of a pydantic error, otherwise the message itself."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
