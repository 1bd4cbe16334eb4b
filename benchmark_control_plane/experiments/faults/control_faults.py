"""Faults of operation: signals, drain and changes of the configuration under load."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping

import httpx

from benchmark_control_plane.experiments.faults.server_under_test import ADMIN_KEY
from benchmark_control_plane.experiments.faults.trial import FaultRow, Trial

_CHANGES, _RELOADS = 50, 10
_PAUSE_S = 0.05
# Between two signals, so that the second one finds requests that the first one lets finish.
_BETWEEN_S = 0.3
_ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


def _signals(*numbers: signal.Signals) -> FaultRow:
    async def inject(trial: Trial) -> None:
        for number in numbers:
            os.kill(trial.server.process.pid, number)
            await asyncio.sleep(_BETWEEN_S)

    return FaultRow(inject, exit_status=0)


async def _drain_then_end(trial: Trial) -> None:
    """POST /admin/drain returns when no request runs; a signal then ends the process."""
    async with httpx.AsyncClient(base_url=trial.server.url, timeout=60) as http:
        answer = await http.post("/admin/drain", headers=_ADMIN)
    trial.notes["status of the drain"] = answer.status_code
    trial.failures += [] if answer.status_code == 200 else [f"the drain returned {answer.status_code}"]
    trial.server.process.send_signal(signal.SIGTERM)


async def _changes(trial: Trial) -> None:
    """Classes and admission change fifty times."""
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=trial.server.url, timeout=60) as http:
        for number in range(_CHANGES):
            part = {
                "classes": {"interactive": {"ttft_ms": 500 + 10 * number}},
                "admission": {"max_waiting": 100 + number},
            }
            answer = await http.put("/admin/config", json=part, headers=_ADMIN)
            statuses[answer.status_code] += 1
            await asyncio.sleep(_PAUSE_S)
    trial.notes["statuses of the changes"] = {str(status): n for status, n in statuses.items()}
    trial.failures += [f"{n} changes returned {status}" for status, n in statuses.items() if status != 200]


async def _reloads(trial: Trial) -> None:
    """The file changes, also into an invalid one, and SIGHUP reloads it; nothing ends."""
    for number in range(_RELOADS):
        waiting = -1 if number == _RELOADS // 2 else 200 + number
        trial.server.rewrite_config({"admission": {"max_waiting": waiting}})
        os.kill(trial.server.process.pid, signal.SIGHUP)
        await asyncio.sleep(10 * _PAUSE_S)
    async with httpx.AsyncClient(base_url=trial.server.url, timeout=60) as http:
        state = (await http.get("/admin/config", headers=_ADMIN)).json()
    found = state["config"]["admission"]["max_waiting"]
    trial.notes["last value in force"] = found
    trial.failures += [] if found == 200 + _RELOADS - 1 else [f"admission.max_waiting is {found}"]


SIMULATED: Mapping[str, FaultRow] = {
    "50 changes of the configuration": FaultRow(_changes),
    "10 reloads by SIGHUP, one invalid": FaultRow(_reloads),
}
ENDING: Mapping[str, FaultRow] = {
    "SIGTERM": _signals(signal.SIGTERM),
    "SIGTERM twice": _signals(signal.SIGTERM, signal.SIGTERM),
    "SIGINT": _signals(signal.SIGINT),
    "drain, then SIGTERM": FaultRow(_drain_then_end, exit_status=0),
}
"""Faults that end the server."""
