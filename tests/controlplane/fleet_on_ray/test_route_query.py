"""What a router makes of the header that HAProxy writes."""

import pytest

from controlplane.fleet.load_report import LoadReport, ModelLoad
from controlplane.fleet.router import RoutedRequest
from controlplane.fleet_on_ray.route_query import routed_request

LLM, EMBEDDING = ModelLoad("llm", 1e-5, 10), ModelLoad("embedding", 1e-6, 0)
REPORTS = [
    LoadReport("a", 1, 0.0, {}, {}),
    LoadReport("b", 1, 0.0, {"embed": EMBEDDING, "chat": LLM}, {}),
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("path=%2Fv1%2Fchat%2Fcompletions&bytes=4000&class=gold&class=&class=&session=",
         RoutedRequest("chat", "gold", 1000)),
        ("path=%2Fv1%2Fembeddings&bytes=80&class=&class=&class=batch&session=user%207",
         RoutedRequest("embed", "batch", 20, session="user 7")),
        ("path=%2Fv1%2Fcompletions&bytes=&class=&session=", RoutedRequest("chat", "", 0)),
        ("path=%2Frerank&bytes=9999999999999&session=", RoutedRequest("embed", "", 0)),
        ("bytes=%D9%A3", RoutedRequest("chat", "", 0)),
        ("", RoutedRequest("chat", "", 0)),
    ],
)  # fmt: skip
def test_a_request_is_read_from_the_query(query: str, expected: RoutedRequest) -> None:
    assert routed_request(query, REPORTS) == expected


def test_without_a_report_no_model_is_named() -> None:
    assert routed_request("path=%2Fv1%2Fembeddings", REPORTS[:1]).model == ""
