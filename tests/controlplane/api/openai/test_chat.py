"""Valid chat and completion requests: OpenAI's objects, buffered and streamed, and what the engine gets."""

from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from backends.testing.scripted import Script, ScriptedGenerator
from controlplane.config import parse
from controlplane.core.clock import milliseconds
from controlplane.core.generation import Sampling
from controlplane.service.bootstrap import build_service
from tests.controlplane.api.example_bodies import CHAT, HI, TEXT, chat, text
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    HELLO,
    RERANK_MODEL,
    WORDS,
    Stage,
    events,
    listening,
    staged,
)
from tests.controlplane.api.scripted_server import TEXT as SAID


def asked(stage: Stage) -> Sampling:
    sampling = stage.generator.runs[0].sampling
    assert sampling is not None
    return sampling


async def chunks(stage: Stage, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await stage.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *contents, done = events(answer)
    assert done == "[DONE]"
    return [orjson.loads(content) for content in contents]


async def test_whole_chat(stage: Stage):
    answer = await stage.http.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"})
    body = answer.json()
    assert body["id"] == "chatcmpl-mine-1"
    assert (body["object"], body["model"]) == ("chat.completion", CHAT_MODEL)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-tandem-decision"] == "ADMIT"
    assert float(answer.headers["x-tandem-queue-ms"]) >= 0


async def test_predicted_ttft_header_appears_once_the_step_time_is_known(stage: Stage):
    for _ in range(3):
        answer = await stage.http.post(CHAT, json=chat())
    assert float(answer.headers["x-tandem-predicted-ttft-ms"]) > 0


async def test_streamed_chat(stage: Stage):
    begun, middle, last = await chunks(stage, CHAT, chat())
    assert begun["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert middle["choices"][0]["delta"] == {"content": " wörld\u2028"}
    assert last["choices"][0] == {
        "index": 0,
        "delta": {"content": "!"},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert len({chunk["id"] for chunk in (begun, middle, last)}) == 1
    assert "usage" not in last


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (TEXT, text()),
        ("/v1/responses", {"model": CHAT_MODEL, "input": "hi"}),
        ("/v1/messages", chat(max_tokens=8)),
    ],
)
async def test_a_stream_has_no_character_at_which_a_client_may_end_a_line(
    stage: Stage, path: str, body: dict[str, Any]
):
    """LiteLLM reads with httpx's `iter_lines`, which ends lines as `splitlines` does."""
    answer = await stage.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200
    assert "wörld\\u2028" in answer.text
    assert answer.text.splitlines() == answer.text.split("\n")[:-1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_comes_in_a_last_chunk_without_choices(stage: Stage, path: str):
    body = (chat if path == CHAT else text)(stream_options={"include_usage": True})
    *others, last = await chunks(stage, path, body)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert [chunk["usage"] for chunk in others] == [None, None, None]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_continuous_usage_stats_add_usage_to_every_chunk(stage: Stage, path: str):
    body = (chat if path == CHAT else text)(
        stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    found = [chunk["usage"] for chunk in await chunks(stage, path, body)]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in found] == [
        (2, 1), (2, 2), (2, 3), (2, 3)
    ]  # fmt: skip


async def test_usage_counts_cached_tokens(stage: Stage):
    stage.generator.default = replace(HELLO, cached_tokens=2)
    usage = (await stage.http.post(CHAT, json=chat())).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    counted = (await stage.http.get("/metrics")).text
    assert 'tandem_prefix_cache_hits_total{class="standard"} 2.0' in counted
    assert f'tandem_prefix_cache_queries_total{{class="standard"}} {usage["prompt_tokens"]}.0' in counted


async def test_several_choices(stage: Stage):
    body = (await stage.http.post(CHAT, json=chat(n=2, temperature=1))).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, SAID), (1, SAID)]
    streamed = await chunks(stage, CHAT, chat(n=2, temperature=1))
    roles = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("role")) for c in streamed]
    assert roles == [(0, "assistant"), (1, "assistant"), (0, None), (1, None), (0, None), (1, None)]


async def test_reasoning_precedes_content(stage: Stage):
    stage.generator.default = replace(HELLO, tokens=5, reasoning_words=("Let", " me"))
    body = (await stage.http.post(CHAT, json=chat())).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Let me", SAID)
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    found = [chunk["choices"][0]["delta"] for chunk in await chunks(stage, CHAT, chat())]
    assert found == [
        {"role": "assistant", "reasoning": "Let"},
        {"reasoning": " me"},
        *({"content": word} for word in WORDS),
    ]
    hidden = (await stage.http.post(CHAT, json=chat(include_reasoning=False))).json()
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert hidden["usage"] == body["usage"]


async def test_tools_reach_the_engine_and_calls_come_back(stage: Stage):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    stage.generator.default = Script(tokens=1, words=("",), tool_calls=(call,))
    [choice] = (await stage.http.post(CHAT, json=chat(tools=tools))).json()["choices"]
    assert choice["message"]["tool_calls"] == [{key: call[key] for key in ("id", "type", "function")}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    [chunk] = await chunks(stage, CHAT, chat(tools=tools))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "tool_calls": [call]}
    prompt = stage.generator.runs[0].chat
    assert prompt is not None
    assert (prompt.tools, prompt.tool_choice) == (tools, "auto")


async def test_logprobs_in_both_formats(stage: Stage):
    body = (await stage.http.post(CHAT, json=chat(logprobs=True, top_logprobs=2))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [(e["token"], len(e["top_logprobs"])) for e in content] == [(word, 2) for word in WORDS]
    body = (await stage.http.post(TEXT, json=text(logprobs=1))).json()
    assert body["choices"][0]["logprobs"]["tokens"] == list(WORDS)
    streamed = await chunks(stage, TEXT, text(logprobs=1))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in streamed] == [[0], [5], [12]]
    assert [run.sampling and run.sampling.logprobs for run in stage.generator.runs] == [2, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [("hi", [2]), ([7, 8, 9], [3]), (["a", "bcd"], [1, 3]), ([[7], [8, 9]], [1, 2])],
)
async def test_completion_prompts(stage: Stage, prompt: Any, prompt_tokens: list[int]):
    body = (await stage.http.post(TEXT, json=text(prompt=prompt))).json()
    count = len(prompt_tokens)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, SAID) for i in range(count)]
    assert body["usage"]["prompt_tokens"] == sum(prompt_tokens)
    assert body["usage"]["completion_tokens"] == 3 * count
    assert sorted(len(run.prompt) for run in stage.generator.runs) == prompt_tokens
    assert {run.sampling and run.sampling.max_tokens for run in stage.generator.runs} == {16}


async def test_more_prompts_than_slots_share_one_stream(stage: Stage):
    prompts = [f"p{number}" for number in range(30)]
    streamed = await chunks(stage, TEXT, text(prompt=prompts, n=1, echo=True))
    found: dict[int, str] = {}
    for chunk in streamed:
        [choice] = chunk["choices"]
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == {index: prompt + SAID for index, prompt in enumerate(prompts)}


async def test_sampling_reaches_the_engine(stage: Stage):
    body = chat(
        max_completion_tokens=9, n=1, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"7": -100}, seed=-3, stop=["x", "y"], top_k=-1, min_p=0.1, repetition_penalty=1.1,
        ignore_eos=True, min_tokens=2, stop_token_ids=[5], skip_special_tokens=False,
        include_stop_str_in_output=True,
    )  # fmt: skip
    assert (await stage.http.post(CHAT, json=body)).status_code == 200
    assert asked(stage) == Sampling(
        max_tokens=9, n=1, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"7": -100}, seed=-3, stop=("x", "y"), top_k=0, min_p=0.1, repetition_penalty=1.1,
        ignore_eos=True, min_tokens=2, stop_token_ids=(5,), skip_special_tokens=False,
        include_stop_str_in_output=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
            {"type": "json_schema", "schema": {"type": "object"}},
        ),
        ({"structured_outputs": {"json": '{"a": 1}'}}, {"type": "json_schema", "schema": {"a": 1}}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"type": "choice", "value": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "value": "a+"}),
    ],
)
async def test_structure_reaches_the_engine(stage: Stage, fields: dict[str, Any], structure: Any):
    assert (await stage.http.post(CHAT, json=chat(**fields))).status_code == 200
    assert asked(stage).structure == structure


async def test_template_options_reach_the_engine(stage: Stage):
    body = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert (await stage.http.post(CHAT, json=body)).status_code == 200
    prompt = stage.generator.runs[0].chat
    assert prompt is not None
    assert prompt.template_options == {"reasoning_effort": "low", "enable_thinking": False}


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
async def test_reasoning_effort_none_disables_thinking(stage: Stage, effort: str, thinks: bool):  # noqa: FBT001
    assert (await stage.http.post(CHAT, json=chat(reasoning_effort=effort))).status_code == 200
    prompt = stage.generator.runs[0].chat
    assert prompt is not None
    assert prompt.template_options == {"reasoning_effort": effort, "enable_thinking": thinks}


async def test_body_may_begin_with_a_byte_order_mark(stage: Stage):
    content = b"\xef\xbb\xbf" + orjson.dumps(chat())
    assert (await stage.http.post(CHAT, content=content)).status_code == 200


async def test_the_last_message_may_be_continued(stage: Stage):
    for fields in ({}, {"add_generation_prompt": False}):
        body = chat(continue_final_message=True, **fields)
        assert (await stage.http.post(CHAT, json=body)).status_code == 200
        prompt = stage.generator.runs[-1].chat
        assert prompt is not None
        assert prompt.template_options == {"continue_final_message": True, "add_generation_prompt": False}


async def test_fields_without_effect_are_accepted(stage: Stage):
    body = chat(
        user="u", safety_identifier="s", metadata={"a": "b"}, store=True, service_tier="auto",
        prompt_cache_key="k", prediction={"type": "content", "content": "x"}, modalities=["text"],
        verbosity="medium", logit_bias=None, functions=None, stop=None, tools=None, parallel_tool_calls=True,
    )  # fmt: skip
    assert (await stage.http.post(CHAT, json=body)).status_code == 200
    assert asked(stage) == Sampling(max_tokens=254)


@pytest.mark.parametrize(
    "message",
    [
        # A response as openai-python, LiteLLM and OpenRouter serialise it.
        {"function_call": None, "tool_calls": None, "refusal": None, "annotations": None, "audio": None},
        {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [{"thinking": "hm"}]},
        {"reasoning_details": [{"type": "reasoning.text"}]},
        # A message as lm-evaluation-harness writes it.
        {"type": "text"},
        {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    ],
)
async def test_messages_may_have_the_fields_of_earlier_responses(stage: Stage, message: dict[str, Any]):
    body = chat(messages=[*HI, {"role": "assistant", "content": "x"} | message, *HI])
    answer = await stage.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("stated", "allowed"),
    [
        ({}, 6),
        ({"max_tokens": None}, 6),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 3),
    ],
)
async def test_default_max_tokens_is_bounded_by_the_context(
    stage: Stage, stated: dict[str, int | None], allowed: int
):
    answer = await stage.http.post(TEXT, json=text(prompt="x" * 250, **stated))
    assert answer.status_code == 200, answer.text
    assert asked(stage).max_tokens == allowed


OBJECTIVES = [
    ({"x-slo-ttft-ms": "150", "x-slo-tpot-ms": "20.5", "x-slo-e2e-ms": "9000"}, {}, (150, 20.5, 9000, None)),
    ({"x-llm-d-slo-ttft-ms": "150", "x-llm-d-slo-tpot-ms": "20"}, {}, (150, 20, None, None)),
    ({}, {"slo": {"ttft_ms": 150, "e2e_ms": 7, "gap_ms": 300}}, (150, None, 7, 300)),
    ({"x-slo-ttft-ms": "150"}, {"slo": {"ttft_ms": 150.0, "tpot_ms": 3}}, (150, 3, None, None)),
    ({"x-slo-gap-ms": "250"}, {}, (None, None, None, 250)),
]


@pytest.mark.parametrize(("headers", "fields", "expected"), OBJECTIVES)
async def test_objectives(stage: Stage, headers: dict[str, str], fields: dict[str, Any], expected: Any):
    answer = await stage.http.post(CHAT, json=chat(**fields), headers=headers)
    assert answer.status_code == 200, answer.text
    slo = stage.generator.runs[0].request.slo
    assert (slo.ttft, slo.tpot, slo.e2e, slo.gap) == tuple(ms and milliseconds(ms) for ms in expected)


@pytest.mark.parametrize(
    "header", ["x-service-class", "x-llm-d-inference-objective", "x-gateway-inference-objective"]
)
async def test_a_gateway_may_name_the_class(header: str):
    classes = {"gold": {"ttft_ms": 150}, "standard": {"default": True}}
    async with staged(classes=classes) as stage:
        answer = await stage.http.post(CHAT, json=chat(), headers={header: "gold"})
        assert answer.status_code == 200, answer.text
        assert stage.generator.runs[0].request.service_class.name == "gold"


async def test_models(stage: Stage):
    body = (await stage.http.get("/v1/models")).json()
    assert [(m["id"], m["object"], m["kind"], m["max_model_len"]) for m in body["data"]] == [
        (CHAT_MODEL, "model", "generate", 256),
        (EMBED_MODEL, "model", "embed", 64),
        (RERANK_MODEL, "model", "rerank", 64),
    ]
    served = (CHAT_MODEL, EMBED_MODEL, RERANK_MODEL)
    assert [(m["root"], m["parent"]) for m in body["data"]] == [(name, None) for name in served]
    assert (await stage.http.get(f"/v1/models/{CHAT_MODEL}")).json() == body["data"][0]


async def test_models_state_their_root():
    config = parse({"models": {"chat": {"model": "org/chat", "name": "chat"}}})
    service = build_service(config, [ScriptedGenerator(model="chat")], [], workspace_bytes=0)
    await service.start()
    assert [(card.id, card.root) for card in service.status.models()] == [("chat", "org/chat")]
    await service.stop()


async def test_health_checks_the_process_and_ready_the_engines(stage: Stage):
    assert (await stage.http.get("/ready")).status_code == 200
    stage.embedder.die("its worker has died")
    ready = await stage.http.get("/ready")
    assert ready.status_code == 503
    assert "embed-model" in ready.json()["error"]["message"]
    assert (await stage.http.get("/health")).status_code == 200


async def test_metrics_count_requests(stage: Stage):
    await stage.http.post(CHAT, json=chat())
    answer = await stage.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "tandem_time_to_first_token_seconds_count" in answer.text


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), ("/v1/embeddings", "input")])
async def test_openapi_describes_the_bodies(stage: Stage, path: str, field: str):
    schema = (await stage.http.get("/openapi.json")).json()
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    named = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert {field, "model", "slo"} <= set(named["properties"])


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
async def test_head_requests_are_supported(stage: Stage, path: str):
    async with listening(stage.app) as url, httpx.AsyncClient(base_url=url) as http:
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == (await http.get(path)).headers["content-type"]
