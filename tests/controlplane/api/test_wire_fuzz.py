"""Random bytes on a connection: each answer is one of those described, and the server serves on."""

import asyncio
import logging
import re
import socket
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.controlplane.api.test_http_protocol import GET, hosted, post

STATUSES = {200, 400, 404, 405, 408, 413, 415, 429, 431}
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")

TOKENS = st.sampled_from([b"GET", b"POST", b"PUT", b"OPTIONS", b"get", b"", b"\x00", b"PRI", b"A" * 300])
TARGETS = st.sampled_from(
    [b"/health", b"/v1/models", b"/v1/chat/completions", b"/v1/models/%00%ff", b"*", b"//", b"http://x/health",
     b"/v1/embeddings?a=" + b"b" * 100, b"/\xff", b" "]
)  # fmt: skip
VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"http/1.1", b""])
HEADERS = st.sampled_from(
    [b"host: x", b"content-length: 2", b"content-length: -1", b"content-length: 99999999999999999999",
     b"content-length: 2\r\ncontent-length: 3", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
     b"content-encoding: br", b"connection: close", b"connection: upgrade\r\nupgrade: websocket",
     b"expect: 100-continue", b"x-request-id: \xff\xfe", b": empty", b"no colon", b"folded: a\r\n b",
     b"x: " + b"y" * 5_000, b"authorization: Bearer \x80", b"x-service-class: none"]
)  # fmt: skip
BODIES = st.one_of(
    st.sampled_from(
        [b"", b"{}", b"{", b"0\r\n\r\n", b"5\r\n{}", b"f" * 16 + b"\r\n", b"2\r\n{}\r\n0\r\n\r\n"]
    ),
    st.binary(max_size=40),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    head = b" ".join([draw(TOKENS), draw(TARGETS), draw(VERSIONS)])
    return b"\r\n".join([head, *draw(st.lists(HEADERS, max_size=4)), b"", draw(BODIES)])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid request with some bytes replaced, removed or inserted."""
    whole = bytearray(draw(st.sampled_from([GET, post(), post({"model": 1}), GET + post() + GET])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(whole)))
        whole[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(whole)


WIRE = st.lists(st.one_of(requests(), mutated(), st.binary(max_size=60)), min_size=1, max_size=3)


def exchange(address: tuple[str, int], parts: list[bytes]) -> bytes:
    """Sends the parts one by one, ends the request side and returns everything that came back."""
    received = b""
    with socket.create_connection(address, timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65_536):
                received += chunk
        except (ConnectionError, OSError) as error:
            # The server may have closed the connection before all was sent.
            assert not isinstance(error, TimeoutError)
    return received


def fuzz(address: tuple[str, int]) -> Counter[int]:
    seen: Counter[int] = Counter()

    @settings(suppress_health_check=list(HealthCheck))
    @given(parts=WIRE)
    def send(parts: list[bytes]) -> None:
        found = exchange(address, parts)
        assert not found or STATUS_LINE.match(found), found[:200]
        statuses = {int(status) for status in STATUS_LINE.findall(found)}
        assert statuses <= STATUSES, (statuses, parts)
        seen.update(statuses)

    send()
    return seen


# Hypothesis marks only tests that have @given themselves; `make fuzz` selects by this mark.
@pytest.mark.hypothesis
async def test_no_bytes_end_the_server_or_get_an_undescribed_answer(caplog):
    caplog.set_level(logging.WARNING)
    async with hosted(limits={"header_timeout_ms": 2_000, "body_timeout_ms": 2_000}) as host:
        seen = await asyncio.to_thread(fuzz, host.address)
        assert (await host.stage.http.get("/health")).status_code == 200
    assert seen[400] and not [record for record in caplog.records if record.exc_info], caplog.text
