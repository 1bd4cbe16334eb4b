"""How does a conversation become tokens? By the chat template that the model brought with it.

Templates expect text content and tool-call arguments as objects; OpenAI's clients send parts and
JSON strings. Both are put right here. A template that cannot write the conversation refuses it.
"""

import json
from collections.abc import Mapping
from typing import Any

from controlplane.core.ports import ChatPrompt, Refused

# Template options that would replace what the server decides.
_RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


def render(tokenizer: Any, prompt: ChatPrompt) -> list[int]:
    """Token ids. `tool_choice: none` leaves the tools out, so the model cannot call them. Raises Refused."""
    options = {"add_generation_prompt": True} | dict(prompt.template_options)
    if taken := sorted(_RESERVED & options.keys()):
        raise Refused(
            f"chat_template_kwargs may not set {', '.join(taken)}: the server does",
            param="chat_template_kwargs",
        )
    offered = None if prompt.tool_choice == "none" else [dict(tool) for tool in prompt.tools] or None
    messages = [_message(message, at) for at, message in enumerate(prompt.messages)]
    try:
        text = tokenizer.apply_chat_template(messages, tools=offered, tokenize=False, **options)
    except Exception as error:
        # Jinja, the template itself and the tokenizer each have their own exceptions.
        raise Refused(f"the model's chat template refused the messages: {error}", param="messages") from error
    if not isinstance(text, str):
        return list(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def characters(prompt: ChatPrompt) -> int:
    """About how much text there is to render."""
    return sum(len(str(message.get("content") or "")) for message in prompt.messages)


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    plain = dict(message)
    plain["content"] = _text(message.get("content"), at)
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, at) for call in calls]
    return plain


def _text(content: Any, at: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(
                f"messages[{at}].content has a part of type {kind!r}: this model takes text only",
                param="messages",
            )
        pieces.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(pieces)


def _call(call: Mapping[str, Any], at: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError as error:
            raise Refused(
                f"messages[{at}].tool_calls: the arguments of {function.get('name')!r} are not JSON: {error}",
                param="messages",
            ) from error
    return {**call, "function": function}
