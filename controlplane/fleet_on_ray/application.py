"""The Ray Serve applications: one for each kind of box, with boxes and routers that HAProxy asks, and a page.

For `serve deploy` the import paths are `controlplane.fleet_on_ray.application:fleet`, whose arguments are the
keys of a fleet file and the name of the kind, and `controlplane.fleet_on_ray.application:page`.
"""

import os
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from controlplane.config import ConfigError
from controlplane.config.fleet_file import BoxFile, FleetFile, parse_fleet
from controlplane.config.reconfigure import restart_digest
from controlplane.fleet_on_ray.box import Box
from controlplane.fleet_on_ray.box_router import BoxChooser, BoxMembership
from controlplane.fleet_on_ray.kind_names import BOX, PAGE, ROUTER, route_prefix
from controlplane.fleet_on_ray.page_deployment import FleetPage
from controlplane.fleet_on_ray.scaling_policy import autoscaling

ROUTER_KEY = "TANDEM_ROUTER_KEY"
"""Environment variable with the routers' key; without it each deployment makes one and replaces all boxes."""
# Far above what a gate holds: Ray Serve must not queue before it, or forecasts would be wrong.
_MAX_ONGOING = 100_000
# A line for each poll of a router. The box's own access log is that of its configuration.
_NO_ACCESS_LOG = {"enable_access_log": False}
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_STOP_MARGIN_S = 30.0


def fleet(arguments: Mapping[str, object]) -> Application:
    """The application of one kind; paths begin at the working directory. Raises ConfigError.

    The arguments are the keys of a fleet file, and `kind`: without it the first one.
    """
    keys = dict(arguments)
    stated = keys.pop("kind", None)
    file, boxes = parse_fleet(keys, source="args", folder=Path.cwd())
    names = list(file.kinds)
    kind = names[0] if stated is None else str(stated)
    if kind not in names:
        raise ConfigError(f"args: kind={kind!r}: is not in kinds; choose one of {', '.join(names)}")
    if len(names) > 1:
        _require_shared_key("applications of several kinds need the same key")
    return application(file, boxes, kind, router_key())


def page(arguments: Mapping[str, object]) -> Application:
    """The application with the page over all boxes, from the arguments of `fleet`. Raises ConfigError."""
    file, boxes = parse_fleet(dict(arguments), source="args", folder=Path.cwd())
    _require_shared_key("the page needs the key of the routers")
    return page_application(file, boxes, router_key())


def _require_shared_key(why: str) -> None:
    if not os.environ.get(ROUTER_KEY):
        raise ConfigError(f"{ROUTER_KEY} is not set; {why}")


def router_key() -> str:
    """The routers' key: that of the environment, or a new one."""
    return os.environ.get(ROUTER_KEY) or secrets.token_hex(16)


def application(file: FleetFile, boxes: Mapping[str, BoxFile], kind: str, key: str) -> Application:
    """The application of a kind in a parsed fleet: its boxes, and routers that know all boxes."""
    stated, own = file.kinds[kind], boxes[kind]
    scaling, first = autoscaling(stated), next(iter(file.kinds))
    path = route_prefix(kind, is_first=kind == first)
    deployed = _deployment(
        Box,
        name=BOX,
        # Ray gives `user_config` to a box in place, and replaces boxes for another version.
        version=f"{restart_digest(own.config)} {key} {path}",
        user_config=own.content,
        **({"num_replicas": stated.boxes} if scaling is None else {"autoscaling_config": scaling}),
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=own.config.server.drain_ms / 1_000 + _STOP_MARGIN_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": stated.cpus, "num_gpus": stated.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=BoxMembership,
            request_router_kwargs={"router_key": key, "path": path, "weight": stated.weight},
        ),
    ).bind(own.content, key)
    others = [name for name in file.kinds if name != kind]
    routers = _deployment(
        BoxChooser,
        name=ROUTER,
        version=f"{key} {others}",
        # Those of the other kinds are asked only while the first kind has no box.
        num_replicas=file.routers if kind == first else 1,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_cpus": 0},
    ).bind(key, deployed, others)
    # The only way to HAProxy's question; Ray calls it private, so the minor release of Ray is pinned.
    return deployed._with_ingress_request_router(routers)


def page_application(file: FleetFile, boxes: Mapping[str, BoxFile], key: str) -> Application:
    """The page over all boxes, with the keys for administration and metrics of the first kind."""
    names = list(file.kinds)
    paths = {route_prefix(kind, is_first=kind == names[0]).rstrip("/"): kind for kind in names}
    server = boxes[names[0]].config.server
    return _deployment(
        FleetPage, name=PAGE, version=f"{key} {paths} {server}", ray_actor_options={"num_cpus": 0}
    ).bind(key, paths, server)


def _deployment(replica: type, *, version: str, **options: Any) -> Deployment:
    """A deployment whose replicas Ray replaces only for another version or other `ray_actor_options`.

    Without a version Ray replaces them at each `serve.run`. `serve deploy` ignores it. Ray calls it internal.
    """
    made = serve.deployment(
        serve.ingress()(replica),
        health_check_period_s=_HEALTH_PERIOD_S,
        logging_config=_NO_ACCESS_LOG,
        **options,
    )
    return made.options(version=sha256(version.encode()).hexdigest(), _internal=True)
