"""`tandem tune` from a simulated log to the edited file, and its answers where there is nothing to write."""

import difflib
import gzip
import html
import json
import re
import signal
import sys
from dataclasses import replace

import orjson
import pytest
import yaml

from benchmark_control_plane.decision_replay.replayed_requests import RequestResult, logged_results
from benchmark_control_plane.experiments.gate.tuning_gain import machine, offered
from benchmark_control_plane.simulator.simulation import SimulatedEmbedding, simulate
from benchmark_control_plane.tuning import evaluation, tune_command
from benchmark_control_plane.tuning.evaluation import BlockResult
from benchmark_control_plane.tuning.load_curve import LOADS
from benchmark_control_plane.tuning.tuning_run import state_file
from controlplane.commands.exit_status import ExitStatus
from controlplane.config import load
from controlplane.service.decision_log.segment_files import segments
from tests.benchmark_control_plane.bench_command import main

pytestmark = pytest.mark.long

MINE = """\
# The configuration that the log was recorded under.
models:
  chat: {model: simulated}
  embeddings: [{model: simulated-embeddings}]
pool: {kv_allocator: kvcached}   # quotas move
classes:
  interactive: {priority: 4, ttft_ms: 500, tpot_ms: 50}
  retrieval: {priority: 4, e2e_ms: 250}
  standard: {priority: 1, default: true, sheddable: false, ttft_ms: 5000}
  batch: {priority: 0, sheddable: false, e2e_ms: 60000}
admission:
  length_predictor: history
  max_waiting: 1     # short
  engine_queue: 0    # none

# in this order
scheduling:
  priority_head_start_ms: 1000   # by default
  # the end
"""
SECONDS, RATE = 30.0, 20.0


def tune(*arguments):
    return main(["tune", *map(str, arguments), "--processes", "1"])


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "my.yaml"
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    sections = {key: part for key, part in yaml.safe_load(MINE).items() if key not in ("models", "pool")}
    logged = {**sections, "decision_log": {"dir": str(folder), "sample": 0}}
    # At even distances and without indexing batches: in so short a log chance would outweigh the gain.
    indexing = (SimulatedEmbedding, "batch")
    traffic = [
        each for each in offered(SECONDS, RATE, seed=3) if (type(each), each.service_class) != indexing
    ]
    even = [replace(each, at=number / RATE) for number, each in enumerate(traffic)]
    # All 16 places are often taken; the configuration rejects what could wait for one.
    simulate(even, replace(machine(0.010), max_running=16), logged)
    return folder


@pytest.mark.slow
def test_a_better_file_is_written_and_the_run_resumes(log, mine, tmp_path, capsys):
    out = tmp_path / "better.yaml"
    assert tune(log, mine, "--out", out, "--trials", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == "better"
    assert found["self_check"]["passed"]
    assert found["held_out"]["gain"] > found["held_out"]["error"] > 0
    keys = {each["key"] for each in found["changes"]}
    assert keys
    assert found["files"] == {"yaml": str(out), "page": str(out.with_suffix(".html"))}
    text = out.read_text()
    load(out)
    removed = [line for line in difflib.ndiff(MINE.splitlines(), text.splitlines()) if line[0] == "-"]
    assert len(removed) <= len(keys)
    assert text.count("# tandem tune: was ") == len(keys)
    for comment in ("# quotas move", "# short", "# none", "# in this order", "# by default", "# the end"):
        assert comment in text
    page = html.unescape(out.with_suffix(".html").read_text())
    assert found["reason"] in page and "Attainment by class, before and after" in page
    assert [each["load"] for each in found["loads"]] == list(LOADS)
    marks = len(found["held_out"]["classes"]) + len(keys) + len(LOADS)
    assert page.count('class="mark"') == marks
    rows = len(state_file(out).read_text().splitlines())
    assert tune(log, mine, "--out", out, "--trials", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out) == found
    # One line that ends the row of a run that was killed.
    assert len(state_file(out).read_text().splitlines()) == rows + 1


class Operator:
    """Replays as logged, but with a longer queue all is met; presses Ctrl-C in each `every`th replay."""

    def __init__(self, every):
        self.every, self.replays = every, 0

    def __call__(self, block, sections):
        self.replays += 1
        if self.every and self.replays % self.every == 0:
            signal.raise_signal(signal.SIGINT)
        found = logged_results(block.traffic.rows[block.first : block.last])
        if sections["admission"].get("max_waiting", 100) > 10:
            found = [RequestResult("met", each.latency_ms or 1.0) for each in found]
        return BlockResult(found, 0.01)


@pytest.fixture
def ctrl_c():
    """Tests started in the background inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_search_gives_the_same_answer(log, mine, tmp_path, capsys, monkeypatch, ctrl_c):
    monkeypatch.setattr(tune_command, "with_host_delays", lambda traffic, most: traffic)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    out = tmp_path / "better.yaml"

    def run(operator):
        """Status, standard output and error of one run."""
        monkeypatch.setattr(evaluation, "replayed", operator)
        status = tune(log, mine, "--out", out, "--trials", "5", "--json")
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    status, found, _ = run(whole := Operator(every=0))
    assert (status, json.loads(found)["answer"]) == (ExitStatus.DONE, "better")
    text = out.read_text()
    out.unlink()
    state_file(out).unlink()
    halting, stages = Operator(every=13), []
    for _ in range(whole.replays // halting.every):
        status, printed, said = run(halting)
        assert (status, printed, out.exists()) == (ExitStatus.INTERRUPTED, "", False)
        # In place of the bar.
        before, _, rest = said.rpartition("\r\x1b[K")
        assert rest == f"interrupted; the same command goes on from {state_file(out)}\n"
        stages += re.findall("search on|verdict on|over load", before)[-1:]
    assert set(stages) == {"search on", "verdict on", "over load"}
    halting.every = 0
    assert run(halting)[:2] == (ExitStatus.DONE, found)
    assert out.read_text() == text
    # A replay in which Ctrl-C was pressed is repeated; no other.
    assert halting.replays == whole.replays + len(stages)


def test_nothing_better_and_a_damaged_log_are_answers(log, mine, tmp_path, capsys):
    (segment,) = segments(log)
    lines = gzip.decompress(segment.read_bytes()).splitlines()
    head = orjson.loads(lines[0])
    damaged = tmp_path / "log"
    damaged.mkdir()
    late = sorted(row["at"] for line in lines if (row := orjson.loads(line))["row"] == "request")[-60]
    config = next(row for line in lines if (row := orjson.loads(line))["row"] == "config")
    second = orjson.dumps({**config, "version": 1, "at": late})
    body = b"\n".join([orjson.dumps({**head, "segment": 1}), *lines[1:], second, lines[-1][:-9]])
    (damaged / segment.name.removesuffix(".gz")).write_bytes(body)
    (damaged / "other.jsonl").write_bytes(orjson.dumps({**head, "schema": 9, "run": "z"}) + b"\n")
    out = tmp_path / "better.yaml"
    assert tune(damaged, mine, "--out", out, "--trials", "1", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == "nothing-better"
    assert found["reason"].startswith("Nothing better found: of 1 trials")
    left_out = "\n".join(found["left_out"])
    for what in ("segment 0 is missing", "torn", "schema version 9", "60 requests: of other runs"):
        assert what in left_out
    assert not out.exists() and found["files"].keys() == {"page"}
    for line in found["left_out"]:
        assert line.partition(":")[0] in out.with_suffix(".html").read_text()


def test_a_log_that_is_not_reproduced_is_not_tuned(log, mine, tmp_path, capsys):
    (segment,) = segments(log)

    def slower(line):
        row = orjson.loads(line)
        if row["row"] == "steps" and row["llm"]:
            row["llm"] |= {key: 3 * row["llm"][key] for key in ("step_s", "decode_s", "prompt_token_s")}
        return orjson.dumps(row)

    other = tmp_path / "log"
    other.mkdir()
    lines = gzip.decompress(segment.read_bytes()).splitlines()
    (other / segment.name.removesuffix(".gz")).write_bytes(b"\n".join(map(slower, lines)) + b"\n")
    out = tmp_path / "better.yaml"
    assert tune(other, mine, "--out", out, "--trials", "1") == 3
    text = capsys.readouterr().out
    assert "not reproduced" in text and "Nothing was tuned" in text
    assert not out.exists() and not out.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--trials", "0"], "--trials=0: should be at least 1"),
        (["--minutes", "0"], "--minutes=0: should be above 0"),
        (["--minutes", "inf"], "--minutes=inf: should be above 0 and at most 10,080"),
        (["--also", "server.port"], "--also server.port"),
    ],
)
def test_bad_options_are_one_message(log, mine, tmp_path, capsys, more, says):
    assert tune(log, mine, "--out", tmp_path / "b.yaml", *more) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "says"),
    [("better.html", "the page is written there"), ("none/better.yaml", "is no folder; create it")],
)
def test_an_output_that_cannot_be_kept_is_refused_before_the_log_is_read(mine, tmp_path, capsys, out, says):
    assert tune(tmp_path / "no-log", mine, "--out", tmp_path / out) == 2
    assert says in capsys.readouterr().err


def test_the_state_of_another_log_and_the_file_itself_are_refused(log, mine, tmp_path, capsys):
    out = tmp_path / "better.yaml"
    state_file(out).write_text("{}\n")
    assert tune(log, mine, "--out", out) == 2
    assert "remove it to begin anew" in capsys.readouterr().err
    assert tune(log, mine, "--out", mine) == 2
    assert "is the configuration itself" in capsys.readouterr().err
