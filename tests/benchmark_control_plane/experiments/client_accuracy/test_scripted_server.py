"""The scripted server in this process, under the load of our own client."""

from statistics import median

import orjson

from benchmark_control_plane.common.http_client import Address, connections, request_bytes
from benchmark_control_plane.experiments.client_accuracy.scripted_server import TRUTH, ServerDelays, listening
from benchmark_control_plane.judge.http_target import Dialect, http_target
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.system_schema import Endpoint
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.request import Kind


async def truth_of(url):
    parts = []
    async with connections(Address.of(url), 1) as pool:
        request = request_bytes(Address.of(url), "GET", TRUTH)
        await pool.exchange(request, parts.append, on_send=lambda: None)
    return orjson.loads(b"".join(parts))


async def test_it_keeps_its_delays_and_reports_them_once():
    server = await listening(ServerDelays(first=0.02, gap=0.004), 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    responses = [PartialResponse() for _ in range(5)]
    async with http_target(Endpoint(url, "scripted"), None, Dialect()) as target:
        for number, response in enumerate(responses):
            await target.send(
                PlannedRequest(f"r{number}", 0.0, Kind.GENERATE, "any", prompt_tokens=3, output_tokens=8),
                response,
            )
    truth = await truth_of(url)
    assert truth["ttft_ms"] >= 20 and truth["tpot_ms"] >= 4
    assert [response.output_tokens for response in responses] == [8] * 5
    assert 1e3 * median(r.tokens[0] - r.sent for r in responses) >= truth["ttft_ms"]
    assert await truth_of(url) == {"ttft_ms": 0.0, "tpot_ms": 0.0}
    server.close()
