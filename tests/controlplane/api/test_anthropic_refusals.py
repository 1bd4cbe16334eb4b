"""What /v1/messages and /v1/messages/count_tokens refuse: Anthropic's error object names the field."""

from typing import Any

import pytest

from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage
from tests.controlplane.api.test_anthropic import ADD, COUNT, KEEP_ALL, PATH, asked


def said(role: str = "user", **block: Any) -> dict[str, Any]:
    return asked(messages=[{"role": role, "content": [block]}])


ENDLESS = {"$ref": "#"}
REFUSED = [
    (PATH, {"model": CHAT_MODEL, "max_tokens": 1}, "messages", "add it"),
    (COUNT, {"model": CHAT_MODEL}, "messages", "add it"),
    (PATH, {"model": CHAT_MODEL, "messages": asked()["messages"]}, "max_tokens", "add it"),
    (PATH, asked(messages=[]), "messages", "at least 1 item"),
    (PATH, asked(max_tokens=0), "max_tokens", "greater than or equal to 1"),
    (PATH, asked(max_tokens=255), "messages", "lower max_tokens"),
    (PATH, asked(temperature=1.5), "temperature", "less than or equal to 1"),
    (
        COUNT,
        asked(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}) | {"max_tokens": None},
        "context_management",
        "is used whole",
    ),
    (PATH, asked(context_management={"edits": [KEEP_ALL | {"keep": 1}]}), "context_management", "shorten it"),
    (PATH, asked(tools=[ADD | {"defer_loading": True}]), "tools[0].defer_loading", "False"),
    (PATH, asked(mcp_servers=[]), "mcp_servers", "offer their tools"),
    (PATH, asked(container="c"), "container", "code execution"),
    (PATH, asked(inference_geo="us"), "inference_geo", "where this server runs"),
    (PATH, asked(n=2), "n", "unknown field"),
    (
        PATH,
        asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        "tools[0].type",
        "server tools",
    ),
    (PATH, asked(tools=[{"name": "f"}]), "tools[0].input_schema", "add it"),
    (PATH, asked(tools=[ADD | {"input_schema": ENDLESS}]), "tools[0].input_schema", "tools[0].input_schema"),
    (PATH, asked(tool_choice={"type": "any"}), "tool_choice", "tools is empty"),
    (PATH, asked(tools=[ADD], tool_choice={"type": "tool", "name": "sub"}), "tool_choice", "not in tools"),
    (PATH, asked(tools=[ADD], tool_choice={"type": "tool"}), "tool_choice.name", "make them agree"),
    (
        PATH,
        asked(output_config={"format": {"type": "json_schema", "schema": ENDLESS}}),
        "output_config.format.schema",
        "refers back to itself",
    ),
    (PATH, said(type="document", source={}), "messages[0].content[0].type", "not passed on to the model"),
    (PATH, said(type="image"), "messages[0].content[0].source", "add it"),
    (
        PATH,
        said(type="image", source={"type": "url", "url": "https://a.b/c.png"}),
        "messages[0].content[0].source.type",
        "nothing is fetched",
    ),
    (
        COUNT,
        said(type="document", source={}) | {"max_tokens": None},
        "messages[0].content[0].type",
        "not passed on to the model",
    ),
    (PATH, said(type="text"), "messages[0].content[0].text", "add it"),
    (PATH, said(type="redacted_thinking", data="x"), "messages", "no block but thinking"),
    (PATH, said(type="redacted_thinking", data="x") | {"system": "s"}, "messages", "no block but thinking"),
    (PATH, said(type="tool_result", tool_use_id="t"), "messages[0].content[0].tool_use_id", "no earlier"),
    (PATH, said("assistant", type="tool_use", id="t", name="n"), "messages[0].content[0].input", "add it"),
    (PATH, said("tool", type="text", text="x"), "messages[0].role", "'user'"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
async def test_refusal_names_field_rule_and_remedy(
    stage: Stage, path: str, body: dict[str, Any], param: str, message: str
):
    answer = await stage.http.post(path, json={k: v for k, v in body.items() if v is not None})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert message in error["message"]
    assert not stage.generator.runs
