"""Names that Ray Serve and HAProxy give to the boxes of a kind; each kind is an application of Ray Serve.

HAProxy connects only to the replicas of an application's ingress deployment, so kinds cannot be deployments
of one application. The first kind has the path `/`, the others have paths that no client may use.
"""

BOX, ROUTER = "Box", "Router"
"""The deployments of each application."""
PAGE, PAGE_PATH = "Page", "/fleet"
"""The deployment of the page over all boxes, and the path of its application."""
PAGE_APPLICATION = "fleet-page"
"""No kind's application has this name."""
HIDDEN_PATH = "/-tandem"
"""What the paths of the other kinds begin with."""


def application_name(kind: str) -> str:
    """The application of a kind."""
    return f"tandem-{kind}"


def route_prefix(kind: str, *, is_first: bool) -> str:
    """The path under which Ray Serve knows the application."""
    return "/" if is_first else f"{HIDDEN_PATH}/{kind}"


def backend_path(backend: str) -> str:
    """The path of the application of a backend that is not the first kind's."""
    return f"{HIDDEN_PATH}/{backend.removeprefix('http-tandem-')}"


def servers_prefix(backend: str) -> str:
    """What the names of HAProxy's servers in a backend begin with: a replica's name without "::" and "#"."""
    return f"SERVE_REPLICA_{backend.removeprefix('http-')}-{BOX}-"
