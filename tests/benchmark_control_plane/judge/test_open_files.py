"""The load generator has as many connections as requests in flight, within the limit of open files."""

import asyncio
import resource
import socket
from pathlib import Path

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.measurement_stages import staged
from benchmark_control_plane.judge.open_files import allow_open_files
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind

AT_A_TIME = 600
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{"data":[{"embedding":""}]}'
EXPERIMENT = """
name: crowd
question: How many requests reach the server at a time?
classes: {documents: {e2e_ms: 1000}}
streams:
  documents: {kind: embed, service_class: documents, share: 1, prompt_tokens: {fixed: 1}, batch: {fixed: 1}}
systems: [{name: crowded, kind: baseline, endpoints: {embeddings: {url: "URL", model: any}}}]
"""


class Crowded:
    """A server that answers nobody before so many requests have arrived."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening, self.arrived, self.is_full = listening, 0, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        self.arrived += 1
        if self.arrived == AT_A_TIME:
            self.is_full.set()
        await self.is_full.wait()
        writer.write(ANSWER)
        await writer.drain()
        writer.close()


def test_every_request_in_flight_has_a_connection(tmp_path: Path) -> None:
    allow_open_files(2 * AT_A_TIME)
    with socket.create_server(("127.0.0.1", 0), backlog=2 * AT_A_TIME) as listening:
        file = tmp_path / "crowd.yaml"
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        file.write_text(EXPERIMENT.replace("URL", url), encoding="utf-8")
        plan = read_experiment(file, tmp_path).plan

        async def act(target, clock, read):
            server = Crowded(listening)
            answers = [PartialResponse() for _ in range(AT_A_TIME)]
            async with (
                await asyncio.start_server(server.serve, sock=listening, backlog=2 * AT_A_TIME),
                asyncio.timeout(20),
            ):
                await asyncio.gather(
                    *(target.send(document(number), answer) for number, answer in enumerate(answers))
                )
            return answers

        with staged(plan, plan.systems[0], {}, tmp_path) as stage:
            answers = stage.act(act)
    assert {answer.status for answer in answers} == {200}


def document(number: int) -> PlannedRequest:
    return PlannedRequest(f"d{number}", 0.0, Kind.EMBED, "documents", lengths=(1,))


@pytest.fixture
def limits(monkeypatch):
    """A process that may open 300 files, and 2,000 at most."""
    now = [300, 2_000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: now.__setitem__(slice(None), given))
    return now


def test_the_limit_of_open_files_is_raised_as_far_as_needed(limits) -> None:
    allow_open_files(40)
    assert limits == [300, 2_000]
    allow_open_files(1_000)
    assert limits == [1_256, 2_000]


def test_a_hard_limit_that_is_too_low_ends_the_experiment_before_its_first_run(limits) -> None:
    with pytest.raises(BadInput, match=r"largest run has 1900 requests.*ulimit -Hn 2156"):
        allow_open_files(1_900)
