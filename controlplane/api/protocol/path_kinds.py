"""The kind of work of each POST endpoint, by its path, for code that acts before the body is read.

A request that is shed is counted by it (`http_protocol`), and a router of a fleet chooses boxes by it
(`fleet_on_ray.route_query`). It imports no framework, so that a router starts without one.
"""

from collections.abc import Mapping

from controlplane.core.request import Kind

KIND_OF_PATH: Mapping[str, Kind] = {
    "/v1/chat/completions": Kind.GENERATE,
    "/v1/completions": Kind.GENERATE,
    "/v1/responses": Kind.GENERATE,
    "/v1/responses/input_tokens": Kind.GENERATE,
    "/v1/messages": Kind.GENERATE,
    "/v1/messages/count_tokens": Kind.GENERATE,
    "/v2/chat": Kind.GENERATE,
    "/v1/embeddings": Kind.EMBED,
    "/v2/embed": Kind.EMBED,
    "/embed": Kind.EMBED,
    "/": Kind.EMBED,
    "/v1/rerank": Kind.EMBED,
    "/v2/rerank": Kind.EMBED,
    "/rerank": Kind.EMBED,
    "/v1/score": Kind.EMBED,
    "/score": Kind.EMBED,
    # They count tokens for any model; most callers ask for the chat model's.
    "/tokenize": Kind.GENERATE,
    "/detokenize": Kind.GENERATE,
    "/v1/tokenize": Kind.GENERATE,
    "/v1/detokenize": Kind.GENERATE,
}
"""Every endpoint with a body that a tenant may send."""
