"""The error for a path that is not served, which names the one that the client's base URL probably missed."""

import re
from collections.abc import Collection

from controlplane.api.errors import Failure


def unknown_path(path: str, served: Collection[str]) -> Failure:
    """The 404 for `path`.

    A client that is configured without `/v1`, with it twice, with a slash at the end or with the prefix of a
    proxy asks for a path of which one of `served` is the end, or which begins with `/v1` there. Cohere's
    older client asks for paths of version 1 of its protocol.
    """
    plain = re.sub("/{2,}", "/", path).rstrip("/")
    newer = re.sub("^/v1/", "/v2/", plain)
    if newer != plain and newer in served:
        return Failure(404, f"no such path; did you mean {newer}? Use Cohere's ClientV2", code="not_found")
    meant = [each for each in served if plain.endswith(each) or each == f"/v1{plain}"]
    remedy = (
        f"did you mean {max(meant, key=len)}? Check the base URL of the client"
        if meant
        else "see /openapi.json for the paths"
    )
    return Failure(404, f"no such path; {remedy}", code="not_found")
