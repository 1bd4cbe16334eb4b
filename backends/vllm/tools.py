"""Which function does the model want called? vLLM's own parsers read it out of the stream.

A request with tools becomes a `ToolTurn`: what to ask of the sampler, and one reader per sample that
splits its text into content and OpenAI's tool-call deltas. Forced calls (`required`, or one function
by name) are constrained by a grammar, exactly as `vllm serve` does it.
"""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager

from backends.vllm.compat import CALLER_MISTAKES
from controlplane.core.ports import ChatPrompt, Refused

CONFIG_KEY = "models.chat.tool_parser"


class ToolReading:
    """The parser of one model. Raises ValueError for a parser name that vLLM does not have."""

    def __init__(self, parser: str | None, tokenizer: Any, model_config: Any) -> None:
        known = ToolParserManager.list_registered()
        if parser is not None and parser not in known:
            raise ValueError(f"{CONFIG_KEY}={parser}: vLLM has {', '.join(known)}")
        self._parser_class = parser and ParserManager.get_parser(
            tool_parser_name=parser, enable_auto_tools=True, model_name=model_config.model
        )
        self._tokenizer = tokenizer
        self._model_config = model_config

    def begin(self, chat: ChatPrompt | None, structure: StructuredOutputsParams | None) -> "ToolTurn | None":
        """`None` when nothing is to be read. Raises Refused."""
        if chat is None or chat.tool_choice == "none":
            return None
        if not chat.tools:
            if chat.tool_choice != "auto":
                raise Refused(f"tool_choice {chat.tool_choice!r} needs tools to choose from", param="tools")
            return None
        if not self._parser_class:
            raise Refused(
                "this server reads no tool calls: its operator has to name the parser for the model's "
                f"call format in {CONFIG_KEY} (for example hermes, llama3_json or mistral)",
                param="tools",
            )
        request = _vllm_request(chat, structure)
        return ToolTurn(self._parser(request).adjust_request(request), self._parser)

    def _parser(self, request: ChatCompletionRequest) -> Any:
        assert self._parser_class
        return self._parser_class(
            self._tokenizer, request.tools, model_config=self._model_config, chat_template_kwargs={}
        )


class ToolTurn:
    """One request with tools. Samples are read apart from each other."""

    def __init__(self, request: ChatCompletionRequest, make_parser: Any) -> None:
        self._request = request
        self._make_parser = make_parser
        self._parsers: dict[int, Any] = {}
        self._called: set[int] = set()
        self.structured_outputs: StructuredOutputsParams | None = request.structured_outputs
        self.skip_special_tokens: bool = request.skip_special_tokens

    def read(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        prompt: Sequence[int],
        *,
        finished: bool,
    ) -> tuple[str, tuple[dict[str, Any], ...]]:
        """What of this step is content, and what is part of a call."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._make_parser(self._request)
        message = parser.parse_delta(text, list(token_ids), self._request, list(prompt), finished=finished)
        if message is None:
            return "", ()
        calls = tuple(call.model_dump(exclude_none=True) for call in message.tool_calls or ())
        if calls:
            self._called.add(index)
        return message.content or "", calls

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """OpenAI says "tool_calls" when the model chose to call, "stop" when it was told which."""
        chose = isinstance(self._request.tool_choice, str)
        return "tool_calls" if reason == "stop" and chose and index in self._called else reason


def _vllm_request(chat: ChatPrompt, structure: StructuredOutputsParams | None) -> ChatCompletionRequest:
    names = [tool.get("function", {}).get("name") for tool in chat.tools]
    if not isinstance(chat.tool_choice, str):
        wanted = chat.tool_choice.get("function", {}).get("name")
        if wanted not in names:
            raise Refused(f"tool_choice names {wanted!r}; the tools are {names}", param="tool_choice")
    try:
        return ChatCompletionRequest(
            messages=[dict(message) for message in chat.messages],
            tools=[dict(tool) for tool in chat.tools],
            tool_choice=chat.tool_choice,
            structured_outputs=structure,
        )
    except CALLER_MISTAKES as error:
        raise Refused(f"tools: {_reason(error)}", param="tools") from error


def _reason(error: Exception) -> str:
    """Pydantic's report of one field, else the message itself."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
