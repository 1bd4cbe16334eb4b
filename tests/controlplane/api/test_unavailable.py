"""Every 503 says when to retry, or that a retry is vain."""

import asyncio
from collections.abc import Mapping

import pytest
from starlette.exceptions import HTTPException

from controlplane.api.errors import Failure, Problem, failure_of, overload_failure, starting_failure
from controlplane.api.operations.health_listener import _stalled
from controlplane.api.startup import starting_response
from controlplane.core.decision import Reason
from controlplane.core.errors import BackendDown, NoMemory
from controlplane.service.runtime import shared_check
from controlplane.service.runtime.start_progress import StartProgress
from tests.controlplane.api.scripted_server import staged
from tests.controlplane.api.test_failures import rejected

UNKNOWN = {"retry-after": "5", "retry-after-ms": "5000"}
VAIN = {"x-should-retry": "false"}


def about_retry(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in (*UNKNOWN, *VAIN) if name in headers}


def response_headers(text: str) -> dict[str, str]:
    """Of a response of the health process."""
    lines = text.partition("\r\n\r\n")[0].split("\r\n")
    return dict(line.split(": ", 1) for line in lines[1:])


def of(error: Exception) -> Failure:
    return failure_of(error, overload_status=503)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (of(BackendDown("it died")), UNKNOWN),
        (of(BackendDown("it died", retry_after=6.2)), {"retry-after": "7", "retry-after-ms": "6200"}),
        (of(BackendDown("it died", is_permanent=True)), VAIN),
        (of(NoMemory("none left", position=0)), UNKNOWN),
        (of(Problem(503, "not now")), UNKNOWN),
        (of(HTTPException(503)), UNKNOWN),
        (of(rejected(Reason.SHUTTING_DOWN, 1000)), {"retry-after": "1", "retry-after-ms": "1000"}),
        (of(rejected(Reason.ENGINE_DOWN, None)), VAIN),
        (of(rejected(Reason.QUEUE_FULL, 2000)), {"retry-after": "2", "retry-after-ms": "2000"}),
        (of(rejected(Reason.QUEUE_FULL, None)), VAIN),
        (starting_failure("loading"), UNKNOWN),
        (overload_failure(503), {"retry-after": "1", "retry-after-ms": "1000"}),
    ],
)  # fmt: skip
def test_every_503_says_whether_to_retry(failure: Failure, expected: dict[str, str]):
    assert failure.status == 503 and about_retry(failure.headers) == expected


@pytest.mark.parametrize(
    "headers",
    [response_headers(_stalled(3.0)), dict(starting_response(StartProgress()).headers)],
    ids=["event loop stalled", "starting"],
)
def test_so_does_a_probe_answered_without_the_service(headers: dict[str, str]):
    assert about_retry(headers) == UNKNOWN


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackendDown("it died"), UNKNOWN),
        (BackendDown("it died", retry_after=9), {"retry-after": "9", "retry-after-ms": "9000"}),
        (BackendDown("it died", is_permanent=True), VAIN),
        (TimeoutError(), UNKNOWN),
    ],
)
async def test_readiness_says_it_too(error: Exception, expected: dict[str, str]):
    async def check() -> None:
        raise error

    async with staged() as stage:
        stage.service.check = check  # type: ignore[method-assign]
        answer = await stage.http.get("/ready")
    assert (answer.status_code, about_retry(answer.headers)) == (503, expected)


async def test_probes_of_a_hung_engine_share_one_ping_and_get_an_answer(monkeypatch):
    monkeypatch.setattr(shared_check, "PATIENCE_SECONDS", 0.05)
    pings = 0

    async def hang() -> None:
        nonlocal pings
        pings += 1
        await asyncio.Event().wait()

    async with staged() as stage:
        stage.generator.check = hang  # type: ignore[method-assign]
        answers = await asyncio.gather(*(stage.http.get("/ready") for _ in range(20)))
        answers.append(await stage.http.get("/ready"))
    assert pings == 1
    for answer in answers:
        assert (answer.status_code, about_retry(answer.headers)) == (503, UNKNOWN)
        assert "no reply from the engines within 2 s" in answer.json()["error"]["message"]


async def test_a_drained_server_is_not_ready_again():
    async with staged() as stage:
        await stage.service.drain(grace=0)
        answer = await stage.http.get("/ready")
    assert (answer.status_code, about_retry(answer.headers)) == (503, VAIN)
    assert "restart it" in answer.json()["error"]["message"]


@pytest.mark.parametrize("status", [429, 500])
def test_no_other_status_gets_these_headers(status: int):
    assert Failure(status, "no").headers == {}


def test_headers_of_the_caller_are_not_changed():
    given = {"allow": "GET"}
    assert Failure(503, "no", headers=given).headers == given | UNKNOWN and given == {"allow": "GET"}
