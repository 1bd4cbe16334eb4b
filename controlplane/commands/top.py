"""The command `tandem top`: shows at a terminal what a running server does and why, from its live feed."""

import argparse
import json
from importlib.util import find_spec

from controlplane.commands.admin_api import CommandFailed, add_server, call
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.live_view import LiveView, plain_text
from controlplane.commands.request_explanation import explained, history

_LIVE = "/admin/live"


def add_top_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the parser of the command."""
    text = "show what a running server does and why, live; without --once it needs the extra [top]"
    top = commands.add_parser("top", help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_server(top)
    top.add_argument("--once", action="store_true", help="print the present state as text and end")
    top.add_argument("--json", action="store_true", help="with --once: print JSON")
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    if options.json and not options.once:
        raise CommandFailed("--json: only with --once; add it", ExitStatus.BAD_INPUT)
    view = LiveView()
    read(options, view)
    if options.once:
        print(json.dumps(view.to_json(), indent=1) if options.json else plain_text(view))
        return ExitStatus.DONE
    if find_spec("textual") is None:
        remedy = "it is in Tandem's extra 'top'; in a clone: pip install '.[top]'; or use --once"
        raise CommandFailed(f"textual is not installed; {remedy}", ExitStatus.BAD_INPUT)
    from controlplane.commands.top_app import TopApp

    TopApp(view, lambda: read(options, view), lambda name: explanation(options, name), options.server).run()
    return ExitStatus.DONE


def read(options: argparse.Namespace, view: LiveView) -> None:
    """Brings the view up to date. Raises CommandFailed."""
    while view.take(call(options, "GET", _LIVE, query={"since": str(view.next)})):
        pass


def explanation(options: argparse.Namespace, request_id: str) -> str:
    """What `tandem explain` prints of a request. Raises CommandFailed."""
    return "\n\n".join(map(explained, history(options, request_id)["requests"]))
