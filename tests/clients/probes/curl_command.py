import json
import subprocess

import probe


def curl(path: str, body: object = None, *headers: str) -> str:
    """The text of the response. Raises CalledProcessError for a status of 400 and more."""
    command = [
        "curl",
        "-sS",
        "--fail-with-body",
        f"{probe.url()}{path}",
        "-H",
        "content-type: application/json",
    ]
    for header in headers:
        command += ["-H", header]
    if body is not None:
        command += ["-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


ASKED = {"model": probe.CHAT, "messages": probe.HELLO, "max_tokens": probe.FEW_TOKENS}


def chat() -> None:
    answer = json.loads(curl("/v1/chat/completions", ASKED, f"x-service-class: {probe.SERVICE_CLASS}"))
    assert answer["choices"][0]["message"]["content"]


def stream() -> None:
    events = curl("/v1/chat/completions", ASKED | {"stream": True}).strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and len(events) > 2


def tools() -> None:
    tool = {"type": "function", "function": {"name": "mood", "parameters": probe.SCHEMA}}
    body = ASKED | {"tools": [tool], "tool_choice": probe.CHOICE, "max_tokens": probe.CALL_TOKENS}
    message = json.loads(curl("/v1/chat/completions", body))["choices"][0]["message"]
    probe.check_mood(message["tool_calls"][0]["function"]["arguments"])


def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "mood", "schema": probe.SCHEMA}}
    body = ASKED | {"response_format": schema, "max_tokens": probe.CALL_TOKENS}
    probe.check_mood(json.loads(curl("/v1/chat/completions", body))["choices"][0]["message"]["content"])


def responses() -> None:
    body = {"model": probe.CHAT, "input": "Hello", "max_output_tokens": probe.FEW_TOKENS}
    assert json.loads(curl("/v1/responses", body))["output"][0]["content"][0]["text"]


def embeddings() -> None:
    rows = json.loads(curl("/v1/embeddings", {"model": probe.EMBEDDINGS, "input": probe.TEXTS}))["data"]
    probe.check_vectors(row["embedding"] for row in rows)


def rerank() -> None:
    body = {"model": probe.RERANKER, "query": "What is scarce?", "documents": probe.TEXTS}
    rows = json.loads(curl("/v1/rerank", body))["results"]
    probe.check_ranks([row["index"] for row in rows], [row["relevance_score"] for row in rows])


def tokens() -> None:
    counted = json.loads(curl("/tokenize", {"messages": probe.HELLO}))["count"]
    assert counted == json.loads(curl("/v1/chat/completions", ASKED))["usage"]["prompt_tokens"]


def models() -> None:
    names = {model["id"] for model in json.loads(curl("/v1/models"))["data"]}
    assert {probe.CHAT, probe.EMBEDDINGS, probe.RERANKER} <= names


def error_of(body: object) -> dict[str, object]:
    try:
        curl("/v1/chat/completions", body)
    except subprocess.CalledProcessError as error:
        return json.loads(error.stdout)["error"]
    raise AssertionError("the server did not refuse the request")


def errors() -> None:
    assert error_of(ASKED | {"model": "nobody"})["code"] == "model_not_found"


def image() -> str:
    return str(error_of(ASKED | {"messages": [{"role": "user", "content": probe.IMAGE_PARTS}]})["param"])


probe.run(
    {
        "chat": chat,
        "stream": stream,
        "tools": tools,
        "structured output": structured,
        "responses": responses,
        "embeddings": embeddings,
        "rerank": rerank,
        "tokens": tokens,
        "models": models,
        "errors": errors,
        "images": image,
    },
)
