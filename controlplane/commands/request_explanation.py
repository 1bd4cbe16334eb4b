"""The command `tandem explain`: how a running server decided a request, or would decide one now, and why."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from controlplane.commands.admin_api import Answer, CommandFailed, add_server, call, print_json
from controlplane.commands.exit_status import ExitStatus
from controlplane.commands.output import has_colours, print_table
from controlplane.core.decision import Reason

REASONS: Mapping[str, str] = {
    Reason.NO_MEMORY: "no memory now",
    Reason.NO_SLOT: "no free slot",
    Reason.TPOT_GUARD: "would slow running requests past their TPOT",
    Reason.BEHIND_OTHERS: "behind others in the queue",
    Reason.NEVER_FITS: "larger than its quota can ever be",
    Reason.SLO_UNATTAINABLE: "objective cannot be met now",
    Reason.DEVICE_TIME: "generations need the device's time more",
    Reason.QUEUE_FULL: "queue is full",
    Reason.QUEUE_TIMEOUT: "waited too long",
    Reason.RATE_LIMITED: "tenant's rate limit",
    Reason.ENGINE_DOWN: "engine is down",
    Reason.SHUTTING_DOWN: "server is shutting down",
}
"""Each reason in the dashboard's words."""


def add_explain_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the parser of the command."""
    text = "show how a running server decided a request or would decide one now, and why"
    parser = commands.add_parser("explain", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("id", nargs="?", help="the client's x-request-id, or the full id of one request")
    parser.add_argument("--model", help="decide a hypothetical request to this model; nothing is admitted")
    parser.add_argument("--tokens", type=int, help="with --model: prompt tokens, of an embedding per input")
    parser.add_argument("--max-tokens", type=int, help="with --model: at most this many output tokens")
    parser.add_argument("--inputs", type=int, help="with --model: texts of an embedding or rerank call")
    parser.add_argument("--class", dest="service_class", help="with --model: service class")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    size = {
        "prompt_tokens": options.tokens, "max_tokens": options.max_tokens, "inputs": options.inputs,
        "service_class": options.service_class,
    }  # fmt: skip
    stated = {name: value for name, value in size.items() if value is not None}
    if options.id is not None and not stated and options.model is None:
        found = history(options, options.id)
        show, shown = _print_request, found["requests"]
    elif options.id is None and options.model is not None and options.tokens is not None:
        content = json.dumps({"model": options.model, **stated}).encode()
        found = call(
            options, "POST", "/admin/explain", headers={"content-type": "application/json"}, content=content
        )
        show, shown = _print_dry_run, [found]
    else:
        message = "give either the id of a request, or --model and --tokens of a hypothetical one"
        raise CommandFailed(f"explain: {message}", ExitStatus.BAD_INPUT)
    if options.json:
        print_json(found)
    else:
        for each in shown:
            show(each)
    return ExitStatus.DONE


def history(options: argparse.Namespace, request_id: str) -> Answer:
    """What the server knows of the requests of this id. Raises CommandFailed."""
    return call(options, "GET", f"/admin/explain/{quote(request_id, safe='')}")


def explained(found: Mapping[str, Any]) -> str:
    """What came of one request as text: outcome, decisions in order, forecast and measured times."""
    return "\n".join([*_about(found), *_plain(found["decisions"]), *_times(found)])


def _print_dry_run(found: Mapping[str, Any]) -> None:
    """Prints the decision on a hypothetical request."""
    request, queue = found["request"], found["queue"]
    print(_decided(found))
    print(f"  {request['kind']}, class {request['class']}, {request['prompt_tokens']:,} prompt tokens")
    print(f"  queue: {queue['others']:,} other requests, {queue['before_it']:,} of them before it")
    if refused := found["others_refused"]:
        print(f"  would be refused for it: {', '.join(refused)}")


def _print_request(found: Mapping[str, Any]) -> None:
    """Prints what came of one request: outcome, decisions in order, forecast and measured times."""
    print("\n".join(_about(found)))
    _print_decisions(found["decisions"])
    if lines := list(_times(found)):
        print("\n".join(lines))


def _about(found: Mapping[str, Any]) -> Iterator[str]:
    """The outcome of a request, and what was asked."""
    request = found["request"]
    late = f" (missed {', '.join(found['missed'])})" if found["missed"] else ""
    yield f"{found['id']}: {found['outcome'] or found['phase']}{late}"
    limit = request.get("max_output_tokens")
    names = ", ".join(f"{name} {request[name]}" for name in ("class", "tenant", "model"))
    sizes = f"{request['prompt_tokens']:,} prompt tokens"
    sizes += f", at most {limit:,} output tokens" if limit else ""
    stated = ", ".join(f"{name} {ms:g} ms" for name, ms in request["objectives_ms"].items())
    yield f"  {request['kind']}, {names}; {sizes}; objectives: {stated or 'none'}"


def _print_decisions(decisions: Sequence[Mapping[str, Any]]) -> None:
    """Prints the decisions in order; on a terminal as a table."""
    if decisions and has_colours():
        rows = [(f"{one['at_ms']:,.1f}", one["decision"], _basis(one)) for one in decisions]
        print_table("decisions", ("ms", "decision", "basis"), rows)
        return
    for line in _plain(decisions):
        print(line)


def _plain(decisions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (f"  {one['at_ms']:>10,.1f} ms  {_decided(one)}" for one in decisions)


def _times(found: Mapping[str, Any]) -> Iterator[str]:
    """Forecast and measured times of a request, and what would be decided now."""
    for title, figures in (("predicted", found["predicted"]), ("measured", found["measured"])):
        if shown := ", ".join(_figures(figures)):
            yield f"  {title}: {shown}"
    if found["now"] is not None:
        yield f"  now: {_decided(found['now'])}"


def _decided(decision: Mapping[str, Any]) -> str:
    """One decision with its reason and the numbers behind it."""
    name = decision["decision"]
    return f"{name}{' ' if name == 'PREEMPTED' else '  '}{_basis(decision)}".rstrip()


def _basis(decision: Mapping[str, Any]) -> str:
    """The reason of a decision and the numbers behind it."""
    if decision["decision"] == "PREEMPTED":
        beneficiary = f" for {decision['for']}" if decision.get("for") else ""
        # The decision log does not have it.
        tokens = decision.get("recompute_tokens")
        again = "" if tokens is None else f"; {tokens:,} tokens to compute again"
        return f"by the {decision['by']}{beneficiary}{again}"
    parts = []
    if (reason := decision.get("reason")) is not None:
        parts.append(f"{reason}: {REASONS.get(reason, reason)}")
    if decision.get("victims"):
        parts.append(f"preempts {', '.join(decision['victims'])}")
    if (places := decision.get("places")) is not None:
        parts.append(f"{places['running']} running, free slots {places['free']}")
    if (memory := decision.get("memory")) is not None:
        used = f"{memory['held_bytes']:,} of {memory['ceiling_bytes']:,} bytes held"
        parts.append(f"{used}, needs {memory['needs_bytes']:,}")
    if (wait := (decision.get("time") or {}).get("predicted_wait_ms")) is not None:
        parts.append(f"predicted wait {wait:,.1f} ms")
    if (retry := decision.get("retry_after_ms")) is not None:
        parts.append(f"retry after {retry / 1_000:,.1f} s")
    return "; ".join(parts)


def _figures(figures: Mapping[str, Any] | None) -> Iterator[str]:
    """Names and values that are known, those of a group with the group's name before them."""
    for name, value in (figures or {}).items():
        if isinstance(value, Mapping):
            yield from (f"{name} {inner}" for inner in _figures(value))
        elif value is not None:
            yield f"{name} {value:,.10g}"
