"""Facts, page and file of an answer, from results that no simulation was needed for."""

import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmark_control_plane.decision_replay.self_check import CheckedFigure, SelfCheck
from benchmark_control_plane.report.tuning_page import tuning_page
from benchmark_control_plane.tuning.ablation import KeyEffect
from benchmark_control_plane.tuning.comparison import ClassDifference, Comparison, Difference
from benchmark_control_plane.tuning.findings import print_tuning, tuning_facts
from benchmark_control_plane.tuning.load_curve import LOADS, LoadPoint
from benchmark_control_plane.tuning.search_space import search_space
from benchmark_control_plane.tuning.trial_search import Tried
from benchmark_control_plane.tuning.tune_command import write_answer
from benchmark_control_plane.tuning.tuning_progress import TuningProgress
from benchmark_control_plane.tuning.tuning_run import BlockSets, Tuned
from benchmark_control_plane.tuning.unattainable import times_alone, unattainable_shares
from controlplane.config import parse
from controlplane.config.loader import read_yaml
from controlplane.core.engine_reports import DeviceSharing
from tests.benchmark_control_plane.tuning.synthetic_blocks import CONTENT, block, traffic

MINE = """\
models: {chat: {model: m}, embeddings: [{model: e}]}
pool: {kv_allocator: kvcached}   # moves
classes:
  interactive: {priority: 4, ttft_ms: 500}
  batch: {default: true, sheddable: false}
scheduling:
  priority_head_start_ms: 0   # none
admission: {max_waiting: 50}
"""
CHANGES = {"scheduling.priority_head_start_ms": 2_000, "admission.max_waiting": 500}
EFFECTS = [
    KeyEffect("scheduling.priority_head_start_ms", Difference(4.5, 1.2)),
    KeyEffect("admission.max_waiting", None),
]


def compared(gains, *, lost=0.0):
    classes = [
        ClassDifference("batch", 500, 1.0, 1.0 - lost / 100, 0.0, 0.0),
        ClassDifference("interactive <b>", 900, 0.6, 0.9, 0.2, 0.05),
    ]
    return Comparison(70.0, gains, classes, 2)


def tuned(verdict=None, *, passes=True, best=True, effects=EFFECTS, cuts=()):
    figure = CheckedFigure(("batch", "generate"), "attainment", 0.9, 0.9 if passes else 0.5, 0.03)
    check = SelfCheck([figure], [], [])
    if not passes:
        return Tuned(check, 9)
    tried = [Tried({}, compared([0.0] * 9)), Tried(CHANGES, compared([5.0] * 9))]
    changes = {each.key: CHANGES[each.key] for each in effects}
    return Tuned(check, 9, tried, tried[1] if best else None, changes, effects, verdict, cuts=cuts)


def not_reproduced(*saturated):
    """A run whose self-check failed in one figure for each of these, and why."""
    figures = [
        CheckedFigure((f"class {n}", "generate"), "attainment", 0.9, 0.5, 0.03, is_saturated=each)
        for n, each in enumerate(saturated)
    ]
    return Tuned(SelfCheck(figures, [("batch", "generate")], []), 9)


def facts_of(found, path=Path("my.yaml")):
    blocks = BlockSets([block()] * 9, [block()] * 9)
    return tuning_facts(Path("log"), path, parse(CONTENT), block().traffic, blocks, found)


@pytest.mark.parametrize(
    ("found", "answer", "says"),
    [
        (tuned(compared([5.0, 6.0, 5.5])), "better", "70.0 -> 75.5 %, +5.5 points"),
        (tuned(compared([5.0, -6.0, 5.5])), "nothing-better", "no more than chance"),
        (tuned(compared([5.0, 6.0, 5.5], lost=3)), "nothing-better", "than they may: batch 3.0"),
        (tuned(compared([0.1, 0.11, 0.12])), "nothing-better", "keys count: 0.2 points"),
        (
            tuned(replace(compared([5.0, 6.0, 5.5]), self_check=6.0, device=0.5)),
            "nothing-better",
            "+5.5 points (95 %: 6.1) on the held-out blocks, more than chance but no more than the model of "
            "the machine may be wrong (self-check 6.0, a slower device 0.5)",
        ),
        (
            tuned(best=False),
            "nothing-better",
            "of 2 trials, 2 of them on all blocks, none has a higher attainment",
        ),
        (tuned(effects=[]), "nothing-better", "no changed key of the best trial"),
        (tuned(cuts=["verdict: there is none"]), "nothing-better", "the time was over before the verdict"),
        (
            not_reproduced(True, True),
            "not-reproduced",
            "log; give a segment of the log from a time with less",
        ),
        (not_reproduced(True, False), "not-reproduced", "log; record while nothing else computes on the"),
        (
            not_reproduced(),
            "not-reproduced",
            "no class has 20 requests of a kind in the blocks of the second",
        ),
    ],
)
def test_the_answer_states_where_the_search_ended(found, answer, says, capsys):
    facts = facts_of(found)
    assert facts["answer"] == answer
    assert says in facts["reason"]
    assert json.loads(json.dumps(facts))["reason"] == facts["reason"]
    print_tuning(block().traffic, found.check, facts)
    out = capsys.readouterr().out
    assert facts["reason"] in out
    assert all(f"cut to end in time: {line}" in out for line in found.cuts)


def test_a_better_file_has_reasons_and_the_page_shows_it(tmp_path):
    path, out = tmp_path / "my.yaml", tmp_path / "better.yaml"
    path.write_text(MINE)
    content = read_yaml(path)
    found = tuned(replace(compared([5.0, 6.0, 5.5]), self_check=0.5, device=0.25))
    facts = facts_of(found, path)
    write_answer(out, path, content, search_space(content, has_quotas=True), found, facts)
    assert out.read_text() == MINE.replace(
        "  priority_head_start_ms: 0   # none",
        "  # tandem tune: was 0; +4.5 points of attainment (95 %: 1.2)\n"
        "  priority_head_start_ms: 2000   # none",
    ).replace(
        "admission: {max_waiting: 50}",
        "# tandem tune: was 50; needed by the other changes\nadmission: {max_waiting: 500}",
    )
    assert facts["files"] == {"yaml": str(out), "page": str(tmp_path / "better.html")}
    page = (tmp_path / "better.html").read_text()
    assert page == tuning_page(facts)
    assert "interactive &lt;b&gt;" in page and "<b>" not in page
    assert "Points that each changed key brings" in page
    assert "off by 1.4 points (95 %; sampling 1.2, self-check 0.5, a slower device 0.2)." in page
    assert "Attainment over load" not in page


def test_a_curve_over_load_is_a_chart_and_a_table(capsys):
    loads = [LoadPoint(load, 9, 95 - 20 * load, 99 - 10 * load, 1.5) for load in LOADS]
    found = replace(tuned(compared([5.0, 6.0, 5.5])), loads=loads)
    facts = facts_of(found)
    page = tuning_page(facts)
    assert Balanced(page).open == []
    chart = page[page.index('data-chart="loads"') :].partition("</svg>")[0]
    assert chart.count('class="mark"') == chart.count('class="refused"') == len(LOADS)
    assert "after, at 130 % of the log&#39;s load: 86.0 %" in chart
    print_tuning(block().traffic, found.check, facts)
    assert "130 %" in capsys.readouterr().out


def test_a_change_of_an_engine_argument_says_what_its_gain_rests_on(capsys):
    effects = [KeyEffect("models.chat.engine.max_num_seqs", Difference(4.5, 1.2))]
    engine = {"engine": {"max_num_seqs": 32}}
    content = {**CONTENT, "models": {**CONTENT["models"], "chat": {"model": "m", **engine}}}
    found = replace(tuned(compared([5.0, 6.0, 5.5])), changes={effects[0].key: 64}, effects=effects)
    blocks = BlockSets([block()] * 9, [block()] * 9)
    facts = tuning_facts(Path("log"), Path("my.yaml"), parse(content), block().traffic, blocks, found)
    print_tuning(block().traffic, found.check, facts)
    line = "max_num_seqs: 32 -> 64: +4.5 points of attainment (95 %: 1.2); extrapolated: roofline"
    assert line in capsys.readouterr().out
    assert "max_num_seqs (extrapolated: roofline)" in tuning_page(facts)


def test_what_a_replay_leaves_as_in_the_log_is_said(capsys):
    other = {
        **CONTENT,
        "models": {**CONTENT["models"], "chat": {"model": "m", "engine": {"max_num_seqs": 9}}},
    }
    effects = [KeyEffect("scheduling.engine.decode_pacing", Difference(4.5, 1.2))]
    found = replace(tuned(compared([5.0, 6.0, 5.5])), changes={effects[0].key: 0}, effects=effects)
    here, blocks = block().traffic, BlockSets([block()] * 9, [block()] * 9)
    beside = replace(here, machine=replace(here.machine, sharing=DeviceSharing.BESIDE))
    facts = tuning_facts(Path("log"), Path("my.yaml"), parse(other), beside, blocks, found)
    print_tuning(beside, found.check, facts)
    line = "models.chat.engine.max_num_seqs: 9 is not replayed; it stays its default, as in the log"
    out, page = capsys.readouterr().out, tuning_page(facts)
    assert f"caution: {line}" in out and f"Caution: {line}" in page
    assert "decode_pacing: 0.8 -> 0: +4.5 points of attainment (95 %: 1.2); extrapolated: the log has" in out
    assert facts_of(found)["changes"][0]["basis"] is None


@pytest.mark.parametrize("found", [tuned(best=False), tuned(effects=[]), tuned(cuts=["search: <b>"])])
def test_a_page_without_a_better_file_is_written(tmp_path, found):
    path, out = tmp_path / "my.yaml", tmp_path / "better.yaml"
    path.write_text(MINE)
    content, facts = read_yaml(path), facts_of(found, path)
    write_answer(out, path, content, search_space(content, has_quotas=True), found, facts)
    assert not out.exists()
    assert Balanced(out.with_suffix(".html").read_text()).open == []


def test_nothing_is_written_for_a_log_that_is_not_reproduced(tmp_path):
    found = tuned(passes=False)
    space = search_space(CONTENT, has_quotas=True)
    write_answer(tmp_path / "b.yaml", tmp_path / "my.yaml", CONTENT, space, found, facts_of(found))
    assert list(tmp_path.iterdir()) == []


class Balanced(HTMLParser):
    """The elements of a page that are not closed."""

    VOID = ("meta", "link", "line", "circle", "path", "rect")

    def __init__(self, page):
        super().__init__()
        self.open = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_objectives_that_an_idle_device_misses_are_out_of_reach():
    rows = block().traffic.rows
    # Ten steps of one prompt token each take 100 ms; steps of 512 tokens take 10 ms.
    assert times_alone(traffic(rows), rows[0])["ttft"] == pytest.approx(10.0)
    config = parse({**CONTENT, "classes": {**CONTENT["classes"], "interactive": {"ttft_ms": 9}}})
    assert unattainable_shares(traffic(rows), config) == {"interactive": 1.0}
    assert unattainable_shares(traffic(rows), parse(CONTENT)) == {}
    embedding = {**rows[0], "kind": "embed", "input_tokens": [10, 30]}
    assert times_alone(traffic(rows), embedding) == {"e2e": pytest.approx(10.0)}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "has_bar"), [(io.StringIO(), False), (Terminal(), True)])
def test_progress_has_a_bar_with_the_best_on_a_terminal(stream, has_bar):
    progress = TuningProgress(stream, 100.0)
    progress.report(Tried(CHANGES, compared([5.0] * 9)), 25.0)
    progress.report(Tried({}, compared([0.0] * 3)), 50.0)
    text = stream.getvalue()
    assert "trial 2: +0.0 points on 3 blocks: as it is\n" in text
    assert ("[############            ] 2 trials; best +4.8 points" in text) == has_bar
