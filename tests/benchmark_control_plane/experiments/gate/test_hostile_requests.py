"""Hostile requests: what is sent, and what does not hold of what they cost."""

from dataclasses import replace

import pytest

from benchmark_control_plane.experiments.gate.hostile_input import AttackCost, Seen
from benchmark_control_plane.experiments.gate.hostile_requests import request_of

CHEAP = AttackCost(
    name="4.7 MB key", run=0, sent_mb=4.7, status=400, reply_s=0.05, replies={"400": 20}, slowest_reply_s=0.4,
    reply_bytes=300, health_port_wait_ms=20.0, health_wait_ms=40.0, chats=40, before=Seen(40.0, 20.0, 50, 49),
    missed=0.05, peak_growth_mb=200.0, growth_mb=10.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"reply_s": 0.2}, ["refusal"]),
        # A limit of time or rate may drop it later, and an answer takes its time.
        ({"reply_s": 4.0, "status": 429}, []),
        ({"reply_s": 1.0, "name": "60 KB regular expression"}, []),
        ({"status": 500, "name": "60 KB regular expression"}, ["refusal"]),
        ({"reply_s": 4.0, "status": 200}, []),
        ({"status": 500}, ["refusal"]),
        ({"health_port_wait_ms": 101.0}, ["health on its own port"]),
        ({"health_wait_ms": 101.0}, ["health on the port of the API"]),
        ({"missed": 0.08}, ["SLOs"]),
        ({"peak_growth_mb": 301.0, "growth_mb": 301.0}, ["memory meanwhile", "memory after"]),
    ],
)
def test_what_does_not_hold_is_named(changes: dict[str, object], broken: list[str]):
    assert list(replace(CHEAP, **changes).broken()) == broken


def test_a_body_has_its_length_and_headers_have_no_end_of_their_own():
    head, body = request_of("100,000 choices", "a-key").split(b"\r\n\r\n")
    assert b"authorization: Bearer a-key\r\n" in head
    assert b"content-length: %d" % len(body) in head
    many = request_of("100,000 headers", "a-key")
    assert many.count(b"\r\nx-filler: h") == 100_000 and many.endswith(b"h\r\n\r\n")
