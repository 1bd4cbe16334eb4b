"""What a router makes of the header that HAProxy writes."""

import pytest

from controlplane.fleet.router import RoutedRequest
from controlplane.fleet_on_ray.route_query import owner_of, routed_request

MODELS = {"llm": "chat", "embedding": "embed"}


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
    assert routed_request(query, MODELS[owner_of(query)]) == expected
