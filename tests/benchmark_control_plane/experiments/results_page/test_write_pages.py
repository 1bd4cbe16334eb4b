"""The pages of results and README.md: every committed result is quoted, with its losses and its source."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.experiments.results_page import (
    comparison_tables,
    component_page,
    kept_results,
    matrix_table,
    result_age,
    write_pages,
)
from benchmark_control_plane.report import formats
from benchmark_control_plane.report.results_folder import committed
from tests import experiments


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    """What the generator writes from the committed results, made once: reading them takes two seconds."""
    return dict(write_pages.expected_files())


@pytest.mark.long
def test_written_pages_match_the_committed_results(pages: dict[Path, str]) -> None:
    for file, text in pages.items():
        assert file.is_file() and file.read_text(encoding="utf-8") == text, (
            f"{file.name} is not what the results say; run: "
            "python -m benchmark_control_plane.experiments.results_page.write_pages"
        )
        if file.suffix == ".svg":
            assert ElementTree.fromstring(text).tag.endswith("svg"), "browsers refuse a file that is not XML"


@pytest.mark.long
def test_every_link_leads_to_a_committed_file(pages: dict[Path, str]) -> None:
    for file, least in ((write_pages.PAGE, 100), (write_pages.COMPONENTS, 40), (write_pages.README, 2 * 6)):
        text = pages[file]
        links = [part.partition(")")[0] for part in text.split("](")[1:]]
        links += [part.partition("\n")[0] for part in text.split("]: ")[1:]]
        assert len(links) >= least
        for path, _, anchor in (link.partition("#") for link in links if "://" not in link):
            target = file.parent / path if path else file
            assert target.is_file(), path
            if target in (write_pages.PAGE, write_pages.COMPONENTS):
                assert anchor in _headings(pages[target]) | {""}


@pytest.mark.long
def test_each_stated_reason_is_of_a_lost_cell(pages: dict[Path, str]) -> None:
    """A reason must go when the cell is measured again and won."""
    lost = pages[write_pages.PAGE].partition("## Where Tandem loses")[2].partition("## ")[0]
    for (name, load), reason in comparison_tables.REASONS.items():
        rows = [row for row in lost.splitlines() if row.startswith(f"| [{name}](#") and reason in row]
        assert any(f"{formats.load(load)} load: -" in row for row in rows), (name, load)


def _headings(page: str) -> set[str]:
    return {line[3:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}


@pytest.mark.long
def test_each_result_that_the_parts_quote_is_linked(pages: dict[Path, str]) -> None:
    page = pages[write_pages.COMPONENTS]
    for file in write_pages.RESULTS.glob("*.json"):
        linked = f"[{file.stem}]: " in page
        assert linked is (component_page.section_of(file) is not None)
        assert not linked or f"| [{file.stem}]" in page or f"([{file.stem}]" in page


@pytest.mark.long
def test_the_readme_quotes_six_results_in_at_most_twelve_lines(pages: dict[Path, str]) -> None:
    block = pages[write_pages.README].partition("<!-- Measured")[2].partition("<!-- End")[0]
    rows = [line for line in block.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert len([line for line in block.splitlines()[1:] if line]) <= 12
    assert all("results.md#" in row for row in rows)


def test_each_result_states_which_rules_it_precedes() -> None:
    """A new result is listed as one of the present rules, and moved when a rule changes."""
    listed = [*result_age.PRECEDES, *result_age.INDEPENDENT, *result_age.CURRENT]
    assert len(listed) == len(set(listed))
    assert {file.stem for file in write_pages.RESULTS.glob("*.json")} <= set(listed)
    for name, number in result_age.PRECEDES.items():
        assert result_age.rules(name) == f"before {number}"
    assert result_age.rules("fault-suite") == "present rules"
    table = result_age.table(["traces", "soak", "mcsf-table"], write_pages.DECISIONS, "decisions")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[1] for row in rows] == ["traces |", "soak |", "mcsf-table |"]
    assert rows[0].startswith("| before [0080](decisions/0080-")


def test_an_experiment_is_quoted_with_its_baselines_and_losses(tmp_path: Path) -> None:
    content = experiments.results()
    (tmp_path / "mix-memory.json").write_text(json.dumps(content))
    page = write_pages.results_page(tmp_path).partition("## Mix-memory")[2]
    head = next(line for line in page.splitlines() if line.startswith("| system |"))
    assert head == (
        "| system | req/s at 90 % | req/s at 60 % | 50 % load | 100 % load | 150 % load | 200 % load "
        "| interactive | batch | embedding | rejected | evicted |"
    )
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    order = ("tandem", "static-split", "plain", "tandem-no-forecast")
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in order]
    words = " ".join(page.split())
    assert all(f"*{name}*: {text}" in words for name, text, *_ in experiments.SYSTEMS)
    assert rows[0].split(" | ")[1:3] == ["11.8 (11.4 to 12.2)", "at least 16"]
    assert "1 of 48 runs not valid and left out" in words
    assert {len(row.split(" | ")) for row in rows} == {len(head.split(" | "))}


def test_the_page_begins_with_what_is_lost_and_what_is_won(tmp_path: Path) -> None:
    (tmp_path / "mix-memory.json").write_text(json.dumps(experiments.results()))
    page = write_pages.results_page(tmp_path)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[:5] == [
        "## What was measured", "## Where Tandem loses", "## Classes that give way", "## Where Tandem wins",
        "## What each mechanism earns",
    ]  # fmt: skip
    assert "Not measured: matrix-sizes, " in page.partition("## Where Tandem loses")[0]
    assert "Against the best baseline, Tandem is ahead in " in page.partition("## Classes")[0]


def test_a_range_states_seeds_without_a_rate_and_seeds_without_a_limit(tmp_path: Path) -> None:
    content = experiments.results()
    row = next(row for row in content["max_goodput_rate"] if row["system"] == "plain")
    row |= {"rps": 8.0, "per_seed": [None, 8.0, 16.0]}
    (tmp_path / "mix-memory.json").write_text(json.dumps(content))
    assert "| 8 (none to at least 16) |" in write_pages.results_page(tmp_path)


def test_each_system_is_listed_with_its_mean_under_each_load(tmp_path: Path) -> None:
    content = experiments.results()
    content["runs"] = [run for run in content["runs"] if (run["system"], run["load"]) != ("plain", 2.0)]
    (tmp_path / "mix-memory.json").write_text(json.dumps(content))
    below = write_pages.results_page(tmp_path).partition("## Mix-memory")[2]
    head, _, *rows = [line.strip("| ").split(" | ") for line in below.splitlines() if line.startswith("|")]
    assert head[3:7] == ["50 % load", "100 % load", "150 % load", "200 % load"]
    ours = [
        run for run in content["runs"] if (run["system"], run["load"]) == ("tandem", 1.5) and run["valid"]
    ]
    attained = [run["attainment"]["overall"] for run in ours]
    assert rows[0][0] == "tandem"
    mean, lowest = (formats.share(share).removesuffix(" %") for share in (fmean(attained), min(attained)))
    assert rows[0][5] == f"{mean} ({lowest})"
    assert [row[6] for row in rows if row[0] == "plain"] == [formats.ABSENT]
    means = {
        name: fmean(
            run["attainment"]["overall"]
            for run in content["runs"]
            if (run["system"], run["load"]) == (name, 1.5) and run["valid"]
        )
        for name in ("tandem", *(s["name"] for s in content["systems"] if s["kind"] == "baseline"))
    }
    best = max(mean for name, mean in means.items() if name != "tandem")
    page = write_pages.results_page(tmp_path)
    assert f", 150 %: {100 * (means['tandem'] - best):+.1f}, " in page.partition("## Where Tandem wins")[2]
    assert " (1 of 2 baselines) |" in page


def test_the_chart_is_a_complete_svg_file(tmp_path: Path) -> None:
    (tmp_path / "mix-memory.json").write_text(json.dumps(experiments.results()))
    front = tmp_path / "README.md"
    front.write_text(f"{write_pages.BEGIN}{write_pages.END}")
    page, parts = tmp_path / "results.md", tmp_path / "component-results.md"
    written = write_pages.expected_files(front, page, parts, tmp_path)
    assert "(../benchmark_control_plane/results/mix-memory.svg)" in written[page]
    assert "](benchmark_control_plane/results/mix-memory.json)" in written[front]
    drawing = ElementTree.fromstring(written[tmp_path / "mix-memory.svg"])
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert {text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")} >= {
        name for name, *_ in experiments.SYSTEMS
    }


def test_an_experiment_on_changed_sources_is_marked(tmp_path: Path) -> None:
    content, file = experiments.results(loads=(1.0,)), tmp_path / "mix-memory.json"
    for commit, is_marked in (("0123abc", False), ("0123abc, changed since", True)):
        content["environment"]["commit"] = commit
        file.write_text(json.dumps(content))
        words = " ".join(write_pages.results_page(tmp_path).split())
        assert ("working tree with changes that the commit lacks" in words) is is_marked


def test_an_experiment_states_what_other_processes_used_and_the_speed_of_the_machine(tmp_path: Path) -> None:
    content: dict[str, Any] = {**experiments.results(loads=(1.0,))}
    for number, run in enumerate(content["runs"]):
        run["other_cores"], run["work_ms"] = (0.5, 31.4) if number == 0 else (0.0, 20.2)
        run["busy_work_ms"] = run["work_ms"] + 10.0
    (tmp_path / "mix-memory.json").write_text(json.dumps(content))
    words = " ".join(write_pages.results_page(tmp_path).split())
    assert "; other processes used 0.04 cores, at most 0.50 in a run; " in words
    assert "; the same piece of work took 20 to 31 ms before the runs; " in words
    # Of the three runs of the static split one was slow.
    (by_system,) = re.findall(r"work took during the runs, by system: ([^;]*) at 100 % load\.", words)
    assert sorted(by_system.split(", ")) == ["30.2", "30.2", "30.2", "33.9"]


@pytest.mark.parametrize(("pause_ms", "is_marked"), [(11.9, False), (36.0, True)])
def test_objectives_from_disturbed_latencies_are_marked(
    tmp_path: Path, pause_ms: float, *, is_marked: bool
) -> None:
    content: dict[str, Any] = {**experiments.results(loads=(1.0,))}
    content["unloaded_ms"] = {"chat": {"tpot_ms": 4.0, "gap_ms": pause_ms}, "documents": {"e2e_ms": 9.0}}
    (tmp_path / "mix-memory.json").write_text(json.dumps(content))
    words = " ".join(write_pages.results_page(tmp_path).split())
    assert ("TPOT chat 4.0 ms, longest pause 36 ms" in words) is is_marked


def test_a_partial_experiment_is_marked(tmp_path: Path) -> None:
    file = tmp_path / "mix-memory.json"
    file.write_text(json.dumps(experiments.results(loads=(1.0,), partial=True)))
    page = " ".join(write_pages.results_page(tmp_path).split())
    assert "**partial: the experiment was interrupted**" in page
    assert "interrupted and in no count below: [mix-memory](#mix-memory)" in page


def test_no_lead_is_stated_over_baselines_of_which_one_was_not_measured(tmp_path: Path) -> None:
    file, lead = tmp_path / "mix-memory.json", "| [mix-memory](#mix-memory) |"
    content = experiments.results(loads=(1.5,), partial=True)
    file.write_text(json.dumps(content))
    assert lead in write_pages.results_page(tmp_path).partition("## Where Tandem wins")[2]
    missing = next(system["name"] for system in content["systems"] if system["kind"] == "baseline")
    content["runs"] = [run for run in content["runs"] if run["system"] != missing]
    file.write_text(json.dumps(content))
    page = write_pages.results_page(tmp_path)
    assert lead not in page and f"**not measured: {missing}**" in " ".join(page.split())


def test_experiments_that_share_all_runs_of_tandem_are_one(tmp_path: Path) -> None:
    one, other = experiments.results(), experiments.results()
    for content, left_out in ((one, "plain"), (other, "tandem-no-forecast")):
        for key, name in (("systems", "name"), ("runs", "system"), ("max_goodput_rate", "system")):
            content[key] = [entry for entry in content[key] if entry[name] != left_out]  # type: ignore[literal-required]
    found = [(tmp_path / "a.json", one), (tmp_path / "b.json", other)]
    (merged,) = kept_results.merged(found)
    assert (merged.name, merged.anchor) == ("a and b", "a-and-b")
    assert {system["name"] for system in merged.results["systems"]} == {
        name for name, *_ in experiments.SYSTEMS
    }
    assert {run["system"] for run in merged.results["runs"]} == {name for name, *_ in experiments.SYSTEMS}
    other["runs"][-1]["attainment"]["overall"] = 0.123
    other["runs"][-1]["system"] = "tandem"
    assert [each.name for each in kept_results.merged(found)] == ["a", "b"]


def test_a_cell_compares_the_seeds_that_both_systems_have() -> None:
    content = experiments.results(loads=(1.0,))
    content["systems"] = [system for system in content["systems"] if system["name"] in ("tandem", "plain")]
    content["runs"] = [run for run in content["runs"] if run["system"] in ("tandem", "plain")]
    for run in content["runs"]:
        share = {1: 0.9, 2: 0.8, 3: 0.1}[run["seed"]]
        run["attainment"]["overall"] = share if run["system"] == "tandem" else share - 0.1
    assert [run["seed"] for run in content["runs"] if not run["valid"]] == [3]
    table = matrix_table.full({"mix 5:5": content}, "link")
    assert "| 85 %, 75 % |" in table
    assert "1 run not valid; shares are of the seeds that both systems have" in table


def test_a_class_judges_an_experiment_of_workflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_pages, "JUDGED", {"other": "batch"})
    content = experiments.results(loads=(1.0,))
    (tmp_path / "other.json").write_text(json.dumps(content))
    section = write_pages.results_page(tmp_path).partition("## Other")[2]
    runs = [run for run in content["runs"] if run["system"] == "tandem"]
    kept = fmean(run["attainment"]["batch"] or 0.0 for run in runs)
    head = "| system | 100 % load | interactive | embedding | rejected | evicted |"
    assert head in section and "attainment, tandem serves" not in section
    assert f"| tandem | {formats.share(kept).removesuffix(' %')} (" in section


def test_engine_rates_are_quoted_with_the_wait_of_requests_that_missed(tmp_path: Path) -> None:
    def study(policy: str, seed: int, rate: float, wait: float) -> dict[str, object]:
        points = [
            {"rate": rate, "strict": 0.91, "missed_wait": {"p95": wait}},
            {"rate": 2 * rate, "strict": 0.89, "missed_wait": {"p95": 2 * wait}},
        ]
        rates = {"strict-90%": rate, "strict-60%": 3 * rate}
        return {
            "dataset": "sharegpt", "policy": policy, "prediction": "oracle", "seed": seed,
            "rates": rates, "points": points,
        }  # fmt: skip

    studies = [study("stock-fcfs", seed, 1.0, 10.0 + seed) for seed in (1, 2)]
    studies += [study("tandem", seed, 2.0, 1_000.0 + seed) for seed in (1, 2)]
    (tmp_path / "engine-frontier.json").write_text(json.dumps({"studies": studies}))
    quoted = component_page.page(tmp_path, "results")
    assert "2.00\N{MULTIPLICATION SIGN} (2.00 to 2.00) at 90 %" in quoted
    assert "missed their SLO at 90 %: 1,002 s in the worst seed (vLLM's FCFS 12 s) |" in quoted
    assert "[engine-frontier]: results/engine-frontier.json" in quoted


def test_the_committed_form_is_smaller_and_yields_the_same_tables(tmp_path: Path) -> None:
    results = experiments.results()
    file = tmp_path / "mix-memory.json"
    file.write_text(committed(results))
    assert len(file.read_text()) < 0.5 * len(json.dumps(results, indent=1))
    whole = tmp_path / "whole"
    whole.mkdir()
    # With the digits of the committed form: half a unit in the last place of a table may fall either way.
    rates = {"max_goodput_rate": json.loads(file.read_text())["max_goodput_rate"]}
    (whole / "mix-memory.json").write_text(json.dumps({**results, **rates}))
    tables = [write_pages.results_page(folder).partition("## Mix-memory")[2] for folder in (tmp_path, whole)]
    assert tables[0] == tables[1] != ""
    drawn = [run for run in json.loads(file.read_text())["runs"] if run["memory"]]
    assert [(run["system"], run["load"]) for run in drawn] == [
        (system, load) for system in ("tandem", "tandem-no-forecast") for load in (0.5, 1.0, 1.5, 2.0)
    ]


def test_only_the_block_between_the_marks_changes() -> None:
    text = f"before\n{write_pages.BEGIN}\nold\n{write_pages.END}\nafter\n"
    once = write_pages.replace_block(text, "new\n")
    assert once == f"before\n{write_pages.BEGIN}\n\nnew\n\n{write_pages.END}\nafter\n"
    assert write_pages.replace_block(once, "new\n") == once


@pytest.mark.parametrize(
    "text",
    [
        "",
        write_pages.BEGIN,
        f"{write_pages.END}{write_pages.BEGIN}",
        (write_pages.BEGIN + write_pages.END) * 2,
    ],
)
def test_missing_or_repeated_marks_raise(text: str) -> None:
    with pytest.raises(BadInput, match="are needed once each, in this order"):
        write_pages.replace_block(text, "new")
