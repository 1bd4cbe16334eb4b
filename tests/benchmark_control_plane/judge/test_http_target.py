"""Tests of the HTTP target against a server in this process, whose time stamps are the reference."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter

import pytest
import uvloop

from benchmark_control_plane.judge.http_target import Dialect, http_target
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.system_schema import Endpoint
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

CHAT = PlannedRequest("r0", 0.0, Kind.GENERATE, "interactive", "acme", prompt_tokens=12, output_tokens=4)
DOCUMENT = PlannedRequest("d0", 0.0, Kind.EMBED, "documents", lengths=(7, 9))
DONE = b"data: [DONE]\n\n"


def chunk(text="w ", **more):
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


def usage(count):
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % count


@asynccontextmanager
async def scripted(events, *, status=b"200 OK", headers=b"", delay=0.0, gap=0.0, closes=False):
    """A server that answers each request with these pieces of a chunked body.

    Yields its URL, the requests as (head, body), and its time stamps as (received, [sent]).
    """
    asked, stamps, writers = [], [], []

    async def serve(reader, writer):
        writers.append(writer)
        while head := await read_head(reader):
            body = await reader.readexactly(int(head.get("content-length", 0)))
            received, sent = perf_counter(), []
            asked.append((head, json.loads(body)))
            await asyncio.sleep(delay)
            writer.write(b"HTTP/1.1 " + status + b"\r\ntransfer-encoding: chunked\r\n" + headers + b"\r\n")
            for number, event in enumerate(events):
                if number and gap:
                    await asyncio.sleep(gap)
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                sent.append(perf_counter())
            if closes:
                writer.close()
                return
            writer.write(b"0\r\n\r\n")
            stamps.append((received, sent))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", asked, stamps
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def read_head(reader):
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = text.rstrip().split("\r\n")
    return {"": first} | {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


@asynccontextmanager
async def target_at(url, dialect=None, api="completions"):
    endpoint = Endpoint(url, "some-model", api, "secret")
    async with http_target(endpoint, endpoint, dialect or Dialect()) as target:
        yield target


async def answer_to(planned, events, **script):
    async with scripted(events, **script) as (url, asked, _), target_at(url) as target:
        answer = PartialResponse()
        await target.send(planned, answer)
        return answer, asked[0]


@pytest.mark.long
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_known_delay_is_measured_within_a_millisecond(loop_factory):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        first, spread = runner.run(measured_delays())
    assert median(first) < 0.001 and median(spread) < 0.001


async def measured_delays():
    """Errors of the client's TTFT and of its time from first to last token, against the server."""
    events = [chunk(), chunk(), chunk(), chunk(), usage(4), DONE]
    first, spread = [], []
    async with scripted(events, delay=0.02, gap=0.005) as (url, _, stamps), target_at(url) as target:
        for _ in range(25):
            answer = PartialResponse()
            await target.send(CHAT, answer)
            received, sent = stamps[-1]
            first.append(abs((answer.tokens[0] - answer.sent) - (sent[0] - received)))
            spread.append(abs((answer.tokens[-1] - answer.tokens[0]) - (sent[3] - sent[0])))
    return first, spread


async def test_a_stage_states_its_objective_to_tandem_only():
    stage = replace(DOCUMENT, e2e_ms=812.5)
    for dialect, stated in ((Dialect(names_classes=True), "812.500"), (Dialect(), None)):
        async with scripted([b"{}"]) as (url, asked, _), target_at(url, dialect) as target:
            target.prepare([DOCUMENT], seed=0)
            await target.send(stage, PartialResponse())
        assert asked[0][0].get("x-slo-e2e-ms") == stated


async def test_chunks_are_time_stamped_and_usage_gives_the_token_count():
    answer, (head, body) = await answer_to(CHAT, [b": ping\n\n", chunk() + chunk(""), usage(7) + DONE])
    assert len(answer.tokens) == 2 and answer.output_tokens == 7
    assert answer.loss is None and answer.status == 200 and answer.ended >= answer.tokens[-1]
    assert head[""] == "POST /v1/completions HTTP/1.1" and head["authorization"] == "Bearer secret"
    assert len(body["prompt"]) == 12 and body["max_tokens"] == 4 and body["ignore_eos"]


async def test_a_chunk_that_only_names_the_role_is_no_token():
    """A server may send it as soon as it has accepted the request."""
    first = {"role": "assistant", "content": ""}
    deltas = (first, first | {"content": "a"}, {"content": "b"}, {})
    chunks = [b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n" for delta in deltas]
    async with scripted([*chunks, usage(4), DONE]) as (url, _, _), target_at(url, api="chat") as target:
        answer = PartialResponse()
        await target.send(CHAT, answer)
    assert len(answer.tokens) == 3 and answer.loss is None


async def test_events_may_be_split_anywhere():
    whole = chunk("a") + chunk("b") + usage(4) + DONE
    answer, _ = await answer_to(CHAT, [whole[i : i + 7] for i in range(0, len(whole), 7)])
    assert len(answer.tokens) == 2 and answer.loss is None


async def test_embedding_ends_when_its_body_is_complete():
    pieces = [b'{"data":[{"embedding":"AA=="},', b'{"embedding":"AA=="}]}']
    answer, (head, body) = await answer_to(DOCUMENT, pieces, gap=0.01)
    assert head[""] == "POST /v1/embeddings HTTP/1.1"
    assert [len(ids) for ids in body["input"]] == [7, 9]
    assert answer.tokens == [] and answer.ended is not None and answer.loss is None


@pytest.mark.parametrize(
    ("events", "script", "loss", "error"),
    [
        ([b'{"error":{"message":"full","code":"queue_full"}}'], {"status": b"429 No"}, Outcome.REJECTED,
         "full"),
        ([b"boom"], {"status": b"500 No"}, Outcome.FAILED, "boom"),
        ([chunk(), b'event: error\ndata: {"error":{"message":"gone","code":"preempted"}}\n\n'], {},
         Outcome.EVICTED, "gone"),
        ([chunk()], {}, Outcome.FAILED, "without"),
        ([DONE], {}, Outcome.FAILED, "without"),
        ([chunk(), usage(3), DONE], {}, Outcome.FAILED, "3 of 4 tokens came"),
        ([chunk(), chunk(), DONE], {}, Outcome.FAILED, "2 of 4 tokens came"),
        ([chunk()], {"closes": True}, Outcome.FAILED, "connection lost"),
    ],
)  # fmt: skip
async def test_each_loss_is_recognised(events, script, loss, error):
    answer, _ = await answer_to(CHAT, events, **script)
    assert answer.loss is loss and error in answer.error and answer.ended is None


async def test_absent_server_is_a_failure():
    async with scripted([]) as (url, _, _):
        pass
    async with target_at(url) as target:
        answer = PartialResponse()
        await target.send(CHAT, answer)
    assert answer.loss is Outcome.FAILED and answer.error


@pytest.mark.parametrize(
    ("dialect", "header", "field"),
    [
        (Dialect(), None, None),
        (Dialect(names_classes=True), "interactive", None),
        (Dialect(priorities={"interactive": 3}), None, 3),
    ],
)
async def test_class_is_sent_in_the_dialect_of_the_server(dialect, header, field):
    async with scripted([chunk(), DONE]) as (url, asked, _), target_at(url, dialect) as target:
        await target.send(CHAT, PartialResponse())
    head, body = asked[0]
    assert head.get("x-service-class") == header and body.get("priority") == field


@pytest.mark.parametrize(("names_classes", "field"), [(True, "as-given"), (False, None)])
async def test_tandem_embeds_drawn_ids_as_they_are(names_classes, field):
    dialect = Dialect(names_classes=names_classes)
    async with scripted([b'{"data":[]}']) as (url, asked, _), target_at(url, dialect) as target:
        await target.send(DOCUMENT, PartialResponse())
    assert asked[0][1].get("token_ids") == field


async def test_fewer_embeddings_than_inputs_are_a_failure():
    answer, _ = await answer_to(DOCUMENT, [b'{"data":[{"embedding":"AA=="}]}'])
    assert answer.loss is Outcome.FAILED and answer.error == "1 of 2 embeddings came"


async def test_server_without_token_ids_gets_words():
    async with scripted([chunk(), DONE]) as (url, asked, _):
        endpoint = Endpoint(url, "some-model", text=True)
        async with http_target(endpoint, endpoint, Dialect()) as target:
            await target.send(CHAT, PartialResponse())
            await target.send(DOCUMENT, PartialResponse())
    (_, chat), (_, document) = asked
    assert len(chat["prompt"].split()) == 12
    assert [len(text.split()) for text in document["input"]] == [7, 9]


async def test_tenant_has_its_own_key():
    dialect = Dialect(tenant_keys={"acme": "theirs"})
    async with scripted([chunk(), DONE]) as (url, asked, _), target_at(url, dialect) as target:
        await target.send(CHAT, PartialResponse())
        await target.send(DOCUMENT, PartialResponse())
    assert [head["authorization"] for head, _ in asked] == ["Bearer theirs", "Bearer secret"]


async def test_a_request_beyond_the_limit_of_its_server_is_rejected_at_once():
    # Both kinds of response in one.
    events = [chunk(), usage(4), b': {"embedding":""}{"embedding":""}\n\n', DONE]
    async with scripted(events, delay=0.05) as (url, asked, _):
        endpoint = Endpoint(url, "some-model", max_concurrent=2)
        async with http_target(endpoint, endpoint, Dialect()) as target:
            chats, document = [PartialResponse() for _ in range(3)], PartialResponse()
            sending = asyncio.gather(*(target.send(CHAT, answer) for answer in chats))
            await target.send(DOCUMENT, document)
            await sending
            later = PartialResponse()
            await target.send(CHAT, later)
    assert [answer.loss for answer in chats] == [None, None, Outcome.REJECTED]
    assert chats[2].status == 429 and chats[2].sent is not None and "2 requests" in chats[2].error
    assert document.loss is None and later.loss is None
    assert len(asked) == 4
