"""The commands `tandem diff`, `tandem apply` and `tandem rollback`: compare and change configurations.

They talk to /admin/config of a running server.
"""

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controlplane.commands.admin_api import (
    CHANGE_TIMEOUT_S,
    Answer,
    CommandFailed,
    add_server,
    call,
    print_json,
)
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.output import has_colours, print_table
from controlplane.config.documents import document_of, flattened, masked
from controlplane.config.live_keys import Taken, taken
from controlplane.config.loader import load

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0}
_POLL_S = 1.0
_NOTES = {
    Taken.LIVE: "live",
    Taken.WITH_MOVING_QUOTAS: "live where quotas move",
    Taken.RESTART: "needs a restart",
}


def add_config_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the parsers of the commands."""
    diff = _command(commands, "diff", "show which keys differ, and which of them need a restart")
    diff.add_argument("first", type=Path, metavar="A.yaml", help="configuration to compare with the other")
    diff.add_argument("second", type=Path, metavar="B.yaml", nargs="?", help="compare with this file")
    add_server(diff, is_required=False)
    apply = _command(commands, "apply", "change the configuration of a running server to that of a file")
    apply.add_argument("file", type=Path, help="YAML: a whole configuration, or a part without `models`")
    add_server(apply)
    apply.add_argument("--dry-run", action="store_true", help="only show what would change")
    apply.add_argument("--if-match", metavar="ETAG", help="fail if another version is in force")
    period = apply.add_mutually_exclusive_group()
    period.add_argument(
        "--guard", type=_seconds, metavar="TIME",
        help="watch the attainment of every class for this time, such as 5m, and undo the change if it falls",
    )  # fmt: skip
    period.add_argument(
        "--for", type=_seconds, metavar="TIME", dest="period",
        help="undo the change after this time, such as 1h, unless another one was applied",
    )  # fmt: skip
    apply.add_argument(
        "--drop", type=float, metavar="POINTS",
        help="points of attainment that a class may lose; default 3 with --guard, none with --for",
    )  # fmt: skip
    back = _command(commands, "rollback", "put an earlier version in force again")
    add_server(back)
    back.add_argument("--version", type=int, help="number of the version; by default the one before")
    back.add_argument("--dry-run", action="store_true", help="only show what would change")
    for parser, run in ((diff, _diff), (apply, _apply), (back, _roll_back)):
        parser.set_defaults(run=run)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _seconds(given: str) -> float:
    match = re.fullmatch(r"(\d{1,7}(?:\.\d+)?)(ms|s|m|h)", given)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{given}: should be a time above 0 with a unit, such as 90s or 5m")
    return float(match[1]) * _UNITS[match[2]]


def _diff(options: argparse.Namespace) -> int:
    if (options.second is None) == (options.server is None):
        raise CommandFailed("diff: give either a second file or --server URL", ExitStatus.BAD_INPUT)
    if options.server is not None:
        try:
            content = options.first.read_bytes()
        except OSError as error:
            message = f"{options.first}: {error.strerror}; give the path of a YAML file"
            raise CommandFailed(message, ExitStatus.BAD_INPUT) from None
        try:
            answer = _put(options, content, {"dry_run": "true"})
        except CommandFailed as error:
            # Status 1 says that there is a difference.
            raise CommandFailed(str(error), ExitStatus.BAD_INPUT) from None
        if options.json:
            print_json(answer)
        else:
            _print_plan(answer, "differs, live:", "differs, needs a restart:", "no key differs")
        return ExitStatus.FAILED if answer["applied"] or answer["needs_restart"] else ExitStatus.DONE
    first, second = (dict(flattened(document_of(load(path)))) for path in (options.first, options.second))
    found = {
        key: (_masked(first, key), _masked(second, key), _NOTES[taken(key)])
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    }
    if options.json:
        print_json({key: {"from": a, "to": b, "taken": note} for key, (a, b, note) in found.items()})
    elif found and has_colours():
        rows = [(key, _text(a), _text(b), note) for key, (a, b, note) in found.items()]
        print_table("keys that differ", ("key", options.first.name, options.second.name, "taken"), rows)
    else:
        lines = [f"{key}: {_text(a)} -> {_text(b)} ({note})" for key, (a, b, note) in found.items()]
        print("\n".join(lines) or "no key differs")
    return ExitStatus.FAILED if found else ExitStatus.DONE


def _masked(values: Mapping[str, Any], path: str) -> Any:
    return masked(values.get(path), path.rpartition(".")[2])


def _apply(options: argparse.Namespace) -> int:
    if options.drop is not None and options.guard is None and options.period is None:
        raise CommandFailed(
            "--drop: only with --guard TIME or --for TIME, which watch the change; add one",
            ExitStatus.BAD_INPUT,
        )
    try:
        content = options.file.read_bytes()
    except OSError as error:
        raise CommandFailed(
            f"{options.file}: {error.strerror}; give the path of a YAML file", ExitStatus.BAD_INPUT
        ) from None
    query = {"dry_run": "true"} if options.dry_run else {}
    for name, seconds in (("guard_ms", options.guard), ("for_ms", options.period)):
        if seconds is not None:
            query[name] = f"{1_000 * seconds:.17g}"
    if options.drop is not None:
        query["drop"] = f"{options.drop:g}"
    answer = _put(options, content, query)
    if options.guard is None or options.dry_run or not answer["applied"]:
        _print_change(options, answer)
        if options.period is not None and answer["applied"] and not options.dry_run and not options.json:
            print(f"undone by the server after {options.period:g} s, unless another change is applied")
        return ExitStatus.DONE
    if not options.json:
        _print_change(options, answer)
        print(
            f"watching for {options.guard:g} s; the server goes on if this command is interrupted", flush=True
        )
        _print_not_judged(options)
    guard = _follow(options, answer["version"])
    if options.json:
        print_json({**answer, "guard": guard})
    else:
        print(f"{guard['state']}: {guard['reason']}")
    return ExitStatus.DONE if guard["state"] == "kept" else ExitStatus.FAILED


def _print_not_judged(options: argparse.Namespace) -> None:
    """Says at the begin which classes the guard will not judge, since it would be too late at its end."""
    guard = call(options, "GET", "/admin/config")["guard"]
    before, fewest = guard["before"], guard["fewest_requests"]
    few = [name for name in guard["not_judged"] if before.get(name, {"requests": 0})["requests"] < fewest]
    if few:
        print(
            f"not judged, with fewer than {fewest} requests in the time before: {', '.join(few)}", flush=True
        )


def _follow(options: argparse.Namespace, version: int) -> Answer:
    """Waits for the guard's end, and returns it."""
    while True:
        found = call(options, "GET", "/admin/config")["guard"]
        if found is None or found["version"] != version:
            return {"version": version, "state": "superseded", "reason": "another guarded change was applied"}
        if found["state"] != "watching":
            guard: Answer = found
            return guard
        time.sleep(min(_POLL_S, options.guard / 10))


def _roll_back(options: argparse.Namespace) -> int:
    query = {"dry_run": "true"} if options.dry_run else {}
    if options.version is not None:
        query["version"] = str(options.version)
    headers = {"x-tandem-source": "tandem rollback"}
    path = "/admin/config/rollback"
    answer = call(options, "POST", path, query=query, headers=headers, timeout_s=CHANGE_TIMEOUT_S)
    _print_change(options, answer)
    return ExitStatus.DONE


def _put(options: argparse.Namespace, content: bytes, query: Mapping[str, str]) -> Answer:
    headers = {"content-type": "application/yaml", "x-tandem-source": f"tandem {options.command}"}
    if (etag := getattr(options, "if_match", None)) is not None:
        # A shell removes the quotes that belong to the ETag.
        headers["if-match"] = etag if etag == "*" or etag.startswith(('"', "W/")) else f'"{etag}"'
    return call(
        options,
        "PUT",
        "/admin/config",
        query=query,
        headers=headers,
        content=content,
        timeout_s=CHANGE_TIMEOUT_S,
    )


def _print_change(options: argparse.Namespace, answer: Answer) -> None:
    if options.json:
        print_json(answer)
        return
    print(f"version {answer['version']} in force, etag {answer['etag']}")
    applied = "would be applied:" if answer["dry_run"] else "applied:"
    _print_plan(answer, applied, "needs a restart:", "no key changes")


def _print_plan(answer: Answer, applied: str, waiting: str, nothing: str) -> None:
    for title, keys in ((applied, answer["applied"]), (waiting, answer["needs_restart"])):
        if keys:
            _print_keys(title, keys)
    if (workers := answer.get("workers")) is not None:
        print("workers:")
        for model, each in workers["models"].items():
            sizes = [f"{each[key]:,}" for key in ("weight_bytes", "workspace_bytes") if key in each]
            size = f", {sizes[0]} bytes of weights and {sizes[1]} of passes" if sizes else ""
            print(f"  {model}: {each['action']}{size}")
        print(f"  reserved: {workers['reserved_bytes']:,} of {workers['reservable_bytes']:,} bytes")
    if not answer["applied"] and not answer["needs_restart"]:
        print(nothing)


def _print_keys(title: str, keys: Mapping[str, Any]) -> None:
    rows = [(key, _text(each["from"]), _text(each["to"]), each.get("reason")) for key, each in keys.items()]
    if has_colours():
        header = ("key", "from", "to", "reason")
        width = 3 if all(reason is None for *_, reason in rows) else 4
        print_table(title.rstrip(":"), header[:width], [row[:width] for row in rows])
        return
    print(title)
    for key, before, after, reason in rows:
        print(f"  {key}: {before} -> {after}" + (f" ({reason})" if reason else ""))


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
