"""Runs a fleet on the GPUs of one machine: a Ray cluster of one node, until a signal."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue

from controlplane.config import ConfigError
from controlplane.config.fleet_file import BoxFile, FleetFile
from controlplane.fleet_on_ray.kind_names import PAGE_APPLICATION, PAGE_PATH, application_name, route_prefix
from controlplane.fleet_on_ray.route_query import HEADER_ROUTE

SETTINGS: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else whoever reaches Ray's ports could run programs on its nodes. It makes the token of a single node.
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": HEADER_ROUTE,
    # A box that died refuses connections, and one that hangs must not hold a request for long.
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": "2",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    # A box that stops stays reachable for so long, until HAProxy knows.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}
"""Environment of every Ray process; a node of a cluster has it before `ray start`."""
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_OBJECT_STORE_BYTES = 100 * 2**20


Fleet = tuple[FleetFile, Mapping[str, BoxFile]]


def serve_fleet(read: Callable[[], Fleet], *, port: int) -> int:
    """Serves until SIGINT or SIGTERM; requests that run then may finish. Raises ConfigError.

    SIGHUP reads the fleet again: boxes take what changed in place, and are replaced step by step where a key
    needs a restart. Returns the exit status.
    """
    program = Path(sys.executable).with_name("tandem-haproxy")
    if not program.exists():
        raise ConfigError(f"{program} does not exist; install the distribution again with the extra 'ray'")
    fleet = read()
    os.environ.update(SETTINGS)
    os.environ[BINARY] = str(program)
    # Ray reads the environment when it is imported.
    import ray
    from ray import serve

    from controlplane.fleet_on_ray.application import router_key

    ray.init(
        address="local",
        include_dashboard=False,
        # Nothing of a request passes the object store.
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="warning",
    )
    # After the start of Ray, which has a handler of its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    reloads: SimpleQueue[int] = SimpleQueue()
    signal.signal(signal.SIGHUP, lambda number, _: reloads.put(number))
    try:
        resources = ray.cluster_resources()
        require_room(fleet[0], resources)
        serve.start(http_options={"port": port})
        key = router_key()
        _deploy(fleet, key, port)
        while True:
            reloads.get()
            fleet = _reloaded(fleet, read, key, port, resources)
    except KeyboardInterrupt:
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()


def require_room(fleet: FleetFile, resources: Mapping[str, float]) -> None:
    """Raises ConfigError if the boxes need more than Ray has of this machine: it would wait without end.

    `resources` are amounts by Ray's names.
    """
    for key, name, words in (("gpus", "GPU", "GPUs"), ("cpus", "CPU", "cores")):
        needed = sum(kind.boxes * getattr(kind, key) for kind in fleet.kinds.values())
        if needed > (has := resources.get(name, 0.0)):
            raise ConfigError(
                f"kinds: the boxes need {needed:g} {words} and this machine has {has:g}; lower boxes or {key}"
            )


def _reloaded(
    fleet: Fleet, read: Callable[[], Fleet], key: str, port: int, resources: Mapping[str, float]
) -> Fleet:
    """The fleet after its files were read and deployed again; what cannot be is stated."""
    try:
        wanted = read()
        if list(wanted[0].kinds) != list(fleet[0].kinds):
            raise ConfigError(
                f"kinds: {', '.join(wanted[0].kinds)}: a fleet that serves keeps "
                f"{', '.join(fleet[0].kinds)}; stop it to add or remove kinds"
            )
        require_room(wanted[0], resources)
    except ConfigError as error:
        _say(f"{error}; nothing was changed")
        return fleet
    try:
        _deploy(wanted, key, port)
    except RuntimeError as error:
        # Ray's only exception for a box that does not start; the boxes that were not replaced serve.
        _say(f"not all boxes took the change: {error}; correct the files and send SIGHUP again")
    return wanted


def _deploy(fleet: Fleet, key: str, port: int) -> None:
    """Gives Ray Serve the applications, and returns when all boxes serve."""
    from ray import serve

    from controlplane.fleet_on_ray.application import application, page_application

    file, boxes = fleet
    page = serve.RunTarget(page_application(file, boxes, key), name=PAGE_APPLICATION, route_prefix=PAGE_PATH)
    kinds = [
        serve.RunTarget(
            application(file, boxes, kind, key),
            name=application_name(kind),
            route_prefix=route_prefix(kind, is_first=number == 0),
        )
        for number, kind in enumerate(file.kinds)
    ]
    serve.run_many([*kinds, page])
    counts = ", ".join(f"{stated.boxes} of kind {kind}" for kind, stated in file.kinds.items())
    _say(f"boxes serve on port {port}: {counts}; page http://127.0.0.1:{port}{PAGE_PATH}/")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
