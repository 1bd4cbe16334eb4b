"""The command `tandem tune LOG my.yaml --out better.yaml`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.decision_replay.first_half_fit import with_host_delays
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic, read_traffic
from benchmark_control_plane.decision_replay.replay_command import sections_for
from benchmark_control_plane.decision_replay.static_shares import LLM_SHARE, decide_sizes, with_shares
from benchmark_control_plane.report.formats import yaml_value
from benchmark_control_plane.report.tuning_page import tuning_page
from benchmark_control_plane.tuning.batch_budgets import SECTION, budget_values, check_budgets
from benchmark_control_plane.tuning.blocks import blocks_of
from benchmark_control_plane.tuning.edited_yaml import Edit, edited_yaml
from benchmark_control_plane.tuning.evaluation import evaluator
from benchmark_control_plane.tuning.findings import change_gain, print_tuning, tuning_facts
from benchmark_control_plane.tuning.paired_blocks import ConfigurationRefused
from benchmark_control_plane.tuning.search_space import (
    TUNABLE,
    SearchSpace,
    Value,
    search_space,
    value_of,
    with_value,
)
from benchmark_control_plane.tuning.time_budget import TimeBudget, TimeIsOver
from benchmark_control_plane.tuning.tuning_progress import TuningProgress
from benchmark_control_plane.tuning.tuning_run import BlockSets, Tuned, state_file, tune_log
from controlplane.commands.exit_status import ExitStatus
from controlplane.config import Config, ConfigError, parse
from controlplane.config.documents import flattened
from controlplane.config.loader import read_yaml
from controlplane.config.packaged import config_path

# Requests of the log that are replayed, up to five times, for what it does not state of machine and host.
_MOST_FOR_HOST_DELAYS = 1_000
# A week.
_MOST_MINUTES = 10_080


def tune(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises BadInput, ConfigError and OSError."""
    _check_options(options)
    time = TimeBudget(60 * options.minutes, options.processes)
    path = config_path(options.config)
    content = read_yaml(path)
    config = parse(content, source=str(path))
    assert isinstance(content, dict)
    traffic = with_host_delays(read_traffic(options.log), most=_MOST_FOR_HOST_DELAYS)

    budgets = budget_values(config, traffic.machine)

    def served(changed: Mapping[str, Any]) -> Mapping[str, Any]:
        new = parse(changed)
        check_budgets(new)
        found = sections_for(traffic, options.log, new, source=str(path))
        values = {key: value_of(new, key) for key in budgets if value_of(new, key) != value_of(config, key)}
        return {**found, SECTION: values} if values else found

    served(content)
    moves = traffic.machine.pool_bytes is not None and config.pool.kv_allocator == "kvcached"
    shares = share_values(traffic, config, lambda value: served(with_value(content, LLM_SHARE, value)))
    space = search_space(
        content, also=options.also, keep=options.keep, has_quotas=moves, budgets={**budgets, **shares}
    )
    blocks = BlockSets(*blocks_of(traffic))
    weights = {name: known.weight for name, known in config.service_classes().items()}
    progress = TuningProgress(sys.stderr, time.seconds)
    interrupt_on_sigterm()
    state = state_file(options.out)
    try:
        with evaluator(
            blocks.all,
            state,
            fingerprint=blocks.fingerprint(),
            time=time,
        ) as replays:
            found = tune_log(
                traffic, blocks, replays, space, weights=weights, served=served, trials=options.trials,
                note=progress.print_line, on_trial=lambda tried: progress.report(tried, time.used),
            )  # fmt: skip
    except TimeIsOver as error:
        raise BadInput(
            f"--minutes={options.minutes:g}: reading {options.log} and its self-check take longer; give "
            "more, or one segment of the log"
        ) from error
    except ConfigurationRefused as error:
        raise BadInput(f"{path}: the server refuses it on the machine of the log: {error}") from error
    except KeyboardInterrupt:
        progress.print_line(f"interrupted; the same command goes on from {state}")
        return ExitStatus.INTERRUPTED
    facts = tuning_facts(options.log, path, config, traffic, blocks, found)
    write_answer(options.out, path, content, space, found, facts)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print_tuning(traffic, found.check, facts)
    return ExitStatus.DONE if found.is_better else ExitStatus.NOT_ATTAINED


def share_values(
    traffic: RecordedTraffic, config: Config, served: Callable[[Value], Mapping[str, Any]]
) -> dict[str, list[Value]]:
    """The static shares of the LLM that may be tried: the longest request and a whole pass fit.

    `served` gives the replayed sections of a share. None of shares that do not decide the sizes of both.
    """
    chat = config.models.chat
    is_stated = chat is None or chat.engine.get("kv_cache_memory_bytes") is not None
    if is_stated or config.pool.kv_allocator != "static" or not decide_sizes(traffic):
        return {}
    found: list[Value] = []
    for value in TUNABLE[LLM_SHARE]:
        with suppress(ConfigError):
            with_shares(traffic, traffic.machine, served(value))
            found.append(value)
    return {LLM_SHARE: found} if found else {}


def _check_options(options: argparse.Namespace) -> None:
    if not 0 < options.minutes <= _MOST_MINUTES:
        raise BadInput(
            f"--minutes={options.minutes:g}: should be above 0 and at most {_MOST_MINUTES:,}, for example 10"
        )
    if options.trials < 1:
        raise BadInput(f"--trials={options.trials}: should be at least 1; --minutes ends the search, too")
    if not 1 <= options.processes <= 256:
        raise BadInput(
            f"--processes={options.processes}: should be from 1 to 256; leave it out for one per core"
        )
    if options.out.exists() and config_path(options.config).samefile(options.out):
        raise BadInput(f"--out {options.out}: is the configuration itself; give another file")
    if options.out == _page_of(options.out):
        raise BadInput(f"--out {options.out}: the page is written there; give a YAML file")
    if not options.out.parent.is_dir():
        raise BadInput(f"--out {options.out}: {options.out.parent} is no folder; create it")


def write_answer(
    out: Path, path: Path, content: Mapping[str, Any], space: SearchSpace, found: Tuned, facts: dict[str, Any]
) -> None:
    """Writes the page, and the better configuration if there is one; names them in `facts`."""
    if not found.check.has_passed:
        return
    is_better = found.is_better and found.changes is not None
    if is_better:
        facts["files"]["yaml"] = str(out)
    page = _page_of(out)
    facts["files"]["page"] = str(page)
    # First, since a file may have a form that cannot be edited.
    page.write_text(tuning_page(facts), encoding="utf-8")
    if is_better and found.changes is not None:
        changed = space.changed(found.changes)
        text = path.read_bytes().decode()
        edits = _edits(content, changed, facts["changes"])
        out.write_bytes(edited_yaml(text, edits, changed, source=str(path)).encode())


def _page_of(out: Path) -> Path:
    return out.with_suffix(".html")


def _edits(
    content: Mapping[str, Any], changed: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]
) -> list[Edit]:
    """One edit for each value of the file that differs; a value that follows from a change has no mark."""
    was = dict(flattened(content))
    marks = {each["key"]: _mark(each) for each in changes}
    return [
        Edit(path.split("."), value, marks.get(path, ""))
        for path, value in flattened(changed)
        if path not in was or was[path] != value
    ]


def _mark(change: Mapping[str, Any]) -> str:
    return f"tandem tune: was {yaml_value(change['before'])}; {change_gain(change)}"
