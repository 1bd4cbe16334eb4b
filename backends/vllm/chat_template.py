"""Renders conversations to token ids with the model's chat template.

Templates expect content as text, tool-call arguments as objects, and absent fields instead of nulls and empty
lists. OpenAI clients send content parts, JSON strings, nulls and empty lists; messages are normalised here.
A conversation that the template cannot render is refused. Anthropic's protocol has system messages at any
position, which many templates refuse; if so, such a conversation is rendered with all of them at its head.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from backends.vllm.json_text import json_text
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt
from controlplane.core.text_limits import TextLimit

# Templates may write an option once for each message.
_FREE_OPTION_CHARACTERS = 4_096
# Arguments of a call with more of the characters `[`, `{` and `,` take more than about 10 ms to parse.
_MOST_VALUES = 100_000
# Template options that the server sets itself, besides the special tokens.
_RESERVED_OPTIONS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


@dataclass(frozen=True, slots=True)
class TemplateImages:
    """How a template writes images: it reads content as a list of parts, or as a text with a mark for each.

    Marks are numbered from 1, and stand before the message's text as in vLLM.
    """

    is_list: bool
    mark: Callable[[int], str]


def render(
    tokenizer: Any, prompt: ChatPrompt, limit: TextLimit, images: TemplateImages | None = None
) -> list[int]:
    """Token ids of the rendered conversation; `tool_choice: none` leaves the tools out. Raises Refused.

    With `images` the model takes images.
    """
    options = {"add_generation_prompt": True} | dict(prompt.template_options)
    reserved = _RESERVED_OPTIONS.union(getattr(tokenizer, "special_tokens_map", ()))
    if taken := sorted(reserved & options.keys()):
        raise Refused(
            f"chat_template_kwargs may not set {', '.join(taken)}; the server sets them",
            param="chat_template_kwargs",
        )
    _check_options(prompt, limit)
    limit.check(_least_characters(prompt), param="messages", where="the conversation")
    offered = None if prompt.tool_choice == "none" else [dict(tool) for tool in prompt.tools] or None
    if offered is not None:
        # Templates write them as JSON, more slowly and with the interpreter lock held.
        limit.check(len(json_text(offered)), param="tools", where="the JSON text of the tools")
    apply = partial(tokenizer.apply_chat_template, tools=offered, tokenize=False, **options)
    text = _applied(apply, prompt, images)
    if not isinstance(text, str):
        return list(text)
    encode = partial(tokenizer.encode, add_special_tokens=prompt.add_special_tokens)
    return list(limit.encode(encode, text, param="messages"))


def _check_options(prompt: ChatPrompt, limit: TextLimit) -> None:
    """Raises Refused for options that make a prompt too long if the template writes them in every message."""
    if not prompt.template_options:
        return
    characters = len(json.dumps(dict(prompt.template_options)))
    if characters > _FREE_OPTION_CHARACTERS:
        where = f"chat_template_kwargs, written in each of {len(prompt.messages):,} messages,"
        limit.check(characters * len(prompt.messages), param="chat_template_kwargs", where=where)


def _least_characters(prompt: ChatPrompt) -> int:
    """Characters that templates write whatever else they write: texts, and the arguments of calls.

    A template takes several passes over a text of megabytes, each of which holds the interpreter lock.
    """
    found = 0
    for message in prompt.messages:
        texts = [part.get("text") for part in _parts(message.get("content")) if isinstance(part, Mapping)]
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        written = (*texts, *(function.get("arguments") for function in calls))
        found += sum(len(text) for text in written if isinstance(text, str))
    return found


def _applied(apply: Callable[..., Any], prompt: ChatPrompt, images: TemplateImages | None) -> Any:
    numbers = count(1)
    messages = [_message(message, at, images, numbers) for at, message in enumerate(prompt.messages)]
    try:
        return apply(messages)
    except Exception as error:
        # Jinja, the template and the tokenizer each raise their own exception types.
        if prompt.can_merge_system and any(message["role"] == "system" for message in messages[1:]):
            return _applied(apply, _with_system_first(prompt), images)
        raise Refused(f"the model's chat template refused the messages: {error}", param="messages") from error


def _with_system_first(prompt: ChatPrompt) -> ChatPrompt:
    """The conversation with all its system messages as one at its head, as in vLLM's `/v1/messages`."""
    system = [message for message in prompt.messages if message["role"] == "system"]
    others = [message for message in prompt.messages if message["role"] != "system"]
    parts = [part for message in system for part in _parts(message.get("content"))]
    return replace(prompt, messages=[{"role": "system", "content": parts}, *others])


def _message(
    message: Mapping[str, Any], at: int, images: TemplateImages | None, numbers: Iterator[int]
) -> dict[str, Any]:
    # Templates test whether a field is present, not whether it is null or empty.
    plain = {key: value for key, value in message.items() if value is not None and value != []}
    content = message.get("content")
    plain["content"] = _text(content, at) if images is None else _content(content, at, images, numbers)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    # vLLM's server returns reasoning under the first name; most templates read the second.
    if reasoning := plain.get("reasoning") or plain.get("reasoning_content"):
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return plain


def _content(content: Any, at: int, images: TemplateImages, numbers: Iterator[int]) -> Any:
    """Content for the template of a model that takes images, whose parts are of type "image" here."""
    parts = _parts(content)
    if images.is_list:
        return [
            part if part.get("type") == "image" else {"type": "text", "text": _text([part], at)}
            for part in parts
        ]
    marks = [images.mark(next(numbers)) for part in parts if part.get("type") == "image"]
    text = _text([part for part in parts if part.get("type") != "image"], at)
    return "\n".join([*marks, text])


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _text(content: Any, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(
                f"messages[{at}].content has a part of type {kind!r}; only text is passed on to a model",
                param="messages",
            )
        pieces.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(piece for piece in pieces if piece)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) and sum(map(arguments.count, "[{,")) <= _MOST_VALUES:
        # A truncated call stays in the conversation, which refusing it would end. Most templates write
        # arguments that are text unchanged; a template that cannot raises an error.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments or "{}")
    return {**call, "function": function}
