"""Images in chats: what is refused by name, what is counted, and that their data does not stay."""

import base64
import gzip
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from controlplane.api.settings import ApiSettings
from controlplane.core.generation import ChatPrompt, ImageLimits, ProcessedImages, RenderedImages
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage, staged

IMAGE_TOKENS = 40
PIXEL = base64.b64encode(b"zanzibar-4711-image").decode()


class ImagesOfFixedSize:
    """Renders each image as a number of tokens; the images are not decoded."""

    def __init__(self) -> None:
        self.limits: list[ImageLimits] = []

    async def render(self, prompt: ChatPrompt, limits: ImageLimits) -> RenderedImages:
        self.limits.append(limits)
        spans = [(at * IMAGE_TOKENS, IMAGE_TOKENS, 2**32 + at) for at in range(len(prompt.images))]
        return RenderedImages([7] * IMAGE_TOKENS * len(spans) + [1, 2], ProcessedImages(spans, "content"))


@pytest.fixture
async def seeing() -> AsyncIterator[Stage]:
    async with staged() as stage:
        stage.generator.images = ImagesOfFixedSize()
        yield stage


def part(url: str = f"data:image/png;base64,{PIXEL}", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"model": CHAT_MODEL, "max_tokens": 3, "messages": [{"role": role, "content": list(content)}]}


TEXT = {"type": "text", "text": "What is this?"}


@pytest.mark.parametrize("images", [1, 2])
async def test_the_tokens_of_images_are_counted_as_by_tokenize(seeing: Stage, images: int):
    body = chat(TEXT, *[part(detail="auto")] * images)
    answer = await seeing.http.post("/v1/chat/completions", json=body)
    counted = await seeing.http.post("/tokenize", json={"messages": body["messages"]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == images * IMAGE_TOKENS + 2 == counted.json()["count"]
    (run,) = seeing.generator.runs
    assert run.request.prompt_tokens == images * IMAGE_TOKENS + 2
    assert len(run.chat.processed.spans) == images
    # Only the processed images stay with the request.
    assert PIXEL not in repr(run.chat)


async def test_images_count_once_for_each_choice(seeing: Stage):
    """The engine gets them with each."""
    for n in (1, 3):
        answer = await seeing.http.post("/v1/chat/completions", json=chat(part()) | {"n": n})
        assert answer.status_code == 200, answer.text
    assert [limits.choices for limits in seeing.generator.images.limits] == [1, 3]


def of_protocol(path: str, url: str = f"data:image/png;base64,{PIXEL}", role: str = "user") -> dict[str, Any]:
    """A text and an image in the words of another protocol."""
    head = {"model": CHAT_MODEL}
    if path.startswith("/v1/responses"):
        parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]
        return head | {"instructions": "Be brief.", "input": [{"role": role, "content": parts}]}
    if path.startswith("/v1/messages"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        parts = [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]
        limit = {} if path.endswith("count_tokens") else {"max_tokens": 3}
        return head | limit | {"system": "Be brief.", "messages": [{"role": role, "content": parts}]}
    return head | {"messages": [{"role": role, "content": [TEXT, part(url)]}]}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v2/chat"])
async def test_other_protocols_pass_images_on(seeing: Stage, path: str):
    answer = await seeing.http.post(path, json=of_protocol(path))
    assert answer.status_code == 200, answer.text
    (run,) = seeing.generator.runs
    assert run.request.prompt_tokens == IMAGE_TOKENS + 2
    assert run.chat.messages[-1]["content"][1] == {"type": "image"}
    assert PIXEL not in repr(run.chat)


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
async def test_other_protocols_count_images(seeing: Stage, path: str):
    answer = await seeing.http.post(path, json=of_protocol(path))
    assert answer.json()["input_tokens"] == IMAGE_TOKENS + 2


OTHER_FIELDS = {
    "/v1/responses": "input[0].content[1]",
    "/v1/messages": "messages[0].content[1]",
    "/v2/chat": "messages[0].content[1]",
}


@pytest.mark.parametrize(("path", "field"), OTHER_FIELDS.items())
async def test_other_protocols_name_their_field_of_an_image(stage: Stage, path: str, field: str):
    answer = await stage.http.post(path, json=of_protocol(path))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert f"{field} is an image; only text is passed on to chat-model" in error["message"]


@pytest.mark.parametrize(
    ("path", "change", "field", "message"),
    [
        ("/v1/responses", {"url": "https://a.b/c.png"}, "input[0].content[1]", "nothing is fetched"),
        ("/v1/responses", {"role": "assistant"}, "input[0].content[1]", "in a message of role assistant"),
        ("/v1/messages", {"role": "assistant"}, "messages[0].content[1]", "in a message of role assistant"),
        ("/v2/chat", {"url": "https://a.b/c.png"}, "messages[0].content[1]", "nothing is fetched"),
        ("/v2/chat", {"role": "assistant"}, "messages[0].content[1].type", "text or thinking"),
    ],
)
async def test_images_that_other_protocols_refuse(
    seeing: Stage, path: str, change: dict[str, str], field: str, message: str
):
    answer = await seeing.http.post(path, json=of_protocol(path, **change))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert message in error["message"]


def of_tool(path: str, url: str = f"data:image/png;base64,{PIXEL}") -> dict[str, Any]:
    """Two results of tools, the first with an image, and a question after them."""
    head = {"model": CHAT_MODEL}
    if path.startswith("/v1/responses"):
        call = {"type": "function_call", "name": "look", "arguments": "{}"}
        parts = [{"type": "input_text", "text": "Seen."}, {"type": "input_image", "image_url": url}]
        result = {"type": "function_call_output"}
        question = {"role": "user", "content": "What?"}
        outputs = [
            result | {"call_id": "a", "output": parts},
            result | {"call_id": "b", "output": "Nothing."},
        ]
        return head | {"input": [call | {"call_id": "a"}, call | {"call_id": "b"}, *outputs, question]}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    use = {"type": "tool_use", "name": "look", "input": {}}
    seen = [{"type": "text", "text": "Seen."}, {"type": "image", "source": source}]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": seen},
        {"type": "tool_result", "tool_use_id": "b", "content": "Nothing."},
        {"type": "text", "text": "What?"},
    ]
    turns = [
        {"role": "assistant", "content": [use | {"id": "a"}, use | {"id": "b"}]},
        {"role": "user", "content": results},
    ]
    return head | {"max_tokens": 3, "messages": turns}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_an_image_of_a_tool_follows_the_results_as_an_image_of_the_user(seeing: Stage, path: str):
    answer = await seeing.http.post(path, json=of_tool(path))
    assert answer.status_code == 200, answer.text
    (run,) = seeing.generator.runs
    assert run.request.prompt_tokens == IMAGE_TOKENS + 2
    assert [message["role"] for message in run.chat.messages][:4] == ["assistant", "tool", "tool", "user"]
    _, seen, nothing, *said = run.chat.messages
    assert seen["content"] == [{"type": "text", "text": "Seen."}]
    assert (seen["tool_call_id"], nothing["tool_call_id"]) == ("a", "b")
    assert said[0]["content"][0] == {"type": "image"}
    assert "What?" in repr(said[-1]["content"])


OF_TOOLS = {"/v1/responses": "input[2].output[1]", "/v1/messages": "messages[1].content[0].content[1]"}


@pytest.mark.parametrize(("path", "field"), OF_TOOLS.items())
async def test_a_model_that_takes_no_images_names_the_field_of_a_tool(stage: Stage, path: str, field: str):
    answer = await stage.http.post(path, json=of_tool(path))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert f"{field} is an image; only text is passed on to chat-model" in error["message"]


async def test_an_image_of_a_tool_needs_its_source(seeing: Stage):
    body = of_tool("/v1/messages")
    del body["messages"][1]["content"][0]["content"][1]["source"]
    error = (await seeing.http.post("/v1/messages", json=body)).json()["error"]
    assert error["param"] == "messages[1].content[0].content[1].source"
    assert "a block of type image needs it" in error["message"]


async def test_a_chat_without_images_is_rendered_as_text(seeing: Stage):
    answer = await seeing.http.post("/v1/chat/completions", json=chat(TEXT))
    assert answer.json()["usage"]["prompt_tokens"] == len(TEXT["text"])
    assert seeing.generator.images.limits == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(part("https://example.com/a.png")), "part 0 has the address 'https://example.com/a.png'"),
        (chat(part("file:///etc/passwd")), "nothing is fetched for a client, so send the image itself"),
        (chat(part("data:image/png,abc")), "send the image itself: data:image/png;base64"),
        (chat(part("data:text/html;base64,abc")), "send the image itself"),
        (chat(TEXT, part(), role="system"), "part 1 is an image in a message of role system"),
        (chat(*[part()] * 9), r"part 8 is one image more than server.limits.max_images, 8"),
        (chat(part(f"data:image/png;base64,{'A' * 3_000_000}")), "max_image_bytes is 2,000,000"),
        (chat(TEXT, part(detail="high")), "part 1: image_url.detail: should be 'auto'"),
        (chat({"type": "image_url", "image_url": PIXEL}), "part 0: image_url: should be an object"),
        (chat({"type": "text", "text": None}), "part 0: text: should be a valid string"),
        (chat({"type": "text"}), "part 0: text: missing; add it"),
        (chat(TEXT, TEXT | {"mood": "good"}), "part 1: mood: unknown field; remove it"),
        (chat({"text": "hi"}), "expected a string or a list of 1 to 4,096"),
        (
            chat({"type": "input_audio", "input_audio": {}}),
            "part 0 is of type input_audio; only text and images",
        ),
    ],
)
async def test_images_that_are_refused(body: dict[str, Any], message: str):
    async with staged(server={"limits": {"max_image_bytes": 2_000_000}}) as stage:
        stage.generator.images = ImagesOfFixedSize()
        for path in ("/v1/chat/completions", "/tokenize"):
            sent = body if path != "/tokenize" else {"messages": body["messages"]}
            answer = await stage.http.post(path, json=sent)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"].startswith("messages")
        assert stage.generator.runs == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_model_that_takes_no_images_refuses_them_by_name(stage: Stage, path: str):
    body = chat(TEXT, part())
    answer = await stage.http.post(path, json=body if path != "/tokenize" else {"messages": body["messages"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "messages[0].content",
        "invalid_value",
    )
    assert "part 1 is an image; only text is passed on to chat-model" in error["message"]


async def test_no_image_reaches_the_log_or_an_explanation(tmp_path):
    settings = ApiSettings(admin_key_sha256=sha256(b"root").hexdigest())
    async with staged(settings, decision_log={"dir": str(tmp_path), "sample": 1}) as stage:
        stage.generator.images = ImagesOfFixedSize()
        headers = {"x-request-id": "mine"}
        answer = await stage.http.post("/v1/chat/completions", json=chat(TEXT, part()), headers=headers)
        explained = await stage.http.get("/admin/explain/mine", headers={"authorization": "Bearer root"})
        assert (answer.status_code, explained.status_code) == (200, 200)
        assert PIXEL not in explained.text
    files = [path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".gz"]
    files += [gzip.decompress(path.read_bytes()) for path in tmp_path.iterdir() if path.suffix == ".gz"]
    assert files
    assert not any(PIXEL.encode() in data or b"zanzibar-4711" in data for data in files)
