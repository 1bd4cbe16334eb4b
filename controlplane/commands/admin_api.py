"""Calls of /admin of a running server, for commands.

The admin key is read from the environment or a file, so that it is in no list of processes. A server on this
machine whose configuration has no key keeps one in a file of its user (`controlplane.start_key`).
"""

import argparse
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.commands.exit_status import ExitStatus
from controlplane.start_key import kept_key

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "TANDEM_ADMIN_KEY"
_TIMEOUT_S = 60.0
# A change may load models.
CHANGE_TIMEOUT_S = 1_800.0
# Statuses that the caller can mend.
_CALLERS = (400, 401, 403, 404, 412, 413)

Answer = Mapping[str, Any]


class CommandFailed(Exception):
    """The command ends with `status` and this message."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_server(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Adds the options `--server` and `--key-file`."""
    parser.add_argument("--server", metavar="URL", required=is_required, help="such as http://127.0.0.1:8000")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the admin key; default: ${KEY_VARIABLE}, or the key file of a server on this machine",
    )


def call(
    options: argparse.Namespace,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Answer:
    """The answer of the server. Raises CommandFailed."""
    import httpx

    # It logs every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sent = {"authorization": f"Bearer {_key(options)}", **(headers or {})}
    url = options.server.rstrip("/") + path
    try:
        answer = httpx.request(
            method, url, params=dict(query or {}), headers=sent, content=content, timeout=timeout_s
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandFailed(f"{url}: {error}; is the server running there?", ExitStatus.FAILED) from None
    if answer.status_code != 200:
        status = ExitStatus.BAD_INPUT if answer.status_code in _CALLERS else ExitStatus.FAILED
        raise CommandFailed(f"{url}: {answer.status_code}: {_message(answer)}", status)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CommandFailed(
            f"{url}: the answer is no JSON object; is a Tandem server there?", ExitStatus.FAILED
        )
    return found


def print_json(value: object) -> None:
    """Prints a value as indented JSON."""
    print(json.dumps(value, indent=1))


def _message(answer: "httpx.Response") -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _key(options: argparse.Namespace) -> str:
    try:
        given = (
            options.key_file.read_text(encoding="utf-8").strip()
            if options.key_file
            else os.environ.get(KEY_VARIABLE) or kept_key(options.server)
        )
    except OSError as error:
        raise CommandFailed(f"{options.key_file}: {error.strerror}", ExitStatus.BAD_INPUT) from None
    except UnicodeDecodeError:
        raise CommandFailed(
            f"{options.key_file}: not UTF-8; give the file that holds the admin key", ExitStatus.BAD_INPUT
        ) from None
    if not given or not given.isascii() or not given.isprintable():
        raise CommandFailed(f"no admin key; set {KEY_VARIABLE} or give --key-file FILE", ExitStatus.BAD_INPUT)
    found: str = given
    return found
