"""Content, escaping and error messages of the page that `render` returns."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.report.page import render
from tests import experiments


class Outline(HTMLParser):
    """Texts by element, open elements, charts, and every address that the page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.fetched: list[str] = []
        self.charts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        for name in ("src", "href"):
            if value := known.get(name):
                self.fetched.append(value)
        if chart := known.get("data-chart"):
            self.charts.append(chart)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(text)


@pytest.fixture(scope="module")
def page() -> str:
    content = experiments.results()
    return render(content, experiments.requests(content))


def test_every_element_is_closed_and_nothing_is_fetched(page: str) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert outline.fetched == ["data:,"]
    assert "url(" not in page and "@import" not in page


def test_the_headline_states_rate_ratio_and_best_baseline(page: str) -> None:
    headline = "".join(Outline(page).texts["h1"]).replace("\N{MULTIPLICATION SIGN}", "x")
    assert headline == (
        "At 90 % attainment, tandem serves 11.8 req/s: 2.10x (2.00x to 2.28x over 3 seeds) "
        "the best baseline (static-split, 5.6 req/s)."
    )


def test_text_of_the_experiment_is_escaped(page: str) -> None:
    assert "chat &amp; embeddings &lt;burst&gt; together" in page
    assert "&lt;/script&gt; must not end anything" in page


@pytest.mark.long
def test_an_invalid_run_is_listed_and_excluded(page: str) -> None:
    alerts = "".join(Outline(page).texts["li"])
    assert alerts == "plain, 200 % load, seed 3: the generator sent 4.1 % of its requests over 50 ms late"
    assert page.count('class="refused"') > 0
    content = experiments.results()
    spoiled = next(run for run in content["runs"] if not run["valid"])
    spoiled["attainment"] = dict.fromkeys(spoiled["attainment"], 0.77777)
    listed = re.sub(r"<svg.*?</svg>", "", render(content, []), flags=re.DOTALL)
    assert "77.8 %" not in listed


def test_attainment_is_shown_as_a_share_of_the_bound(page: str) -> None:
    assert "of the bound" not in page
    content = experiments.results()
    for run in content["runs"]:
        run["attainment"]["overall"] = 0.6
        run["bound"] = {"attainment": 0.75, "feasible": 0.7}
    bounded = render(content, [])
    head = next(head for head in re.findall(r"<thead>(.*?)</thead>", bounded) if ">goodput<" in head)
    assert ">share of the bound<" in head and ">attainable share of it<" in head
    assert "80 % of the bound" in bounded and "93.3 %" in bounded


def test_partial_results_are_marked(page: str) -> None:
    assert "Partial." not in page
    assert "Partial." in render(experiments.results(partial=True), [])


def test_every_table_of_goodput_shows_rejected_and_evicted(page: str) -> None:
    heads = re.findall(r"<thead>(.*?)</thead>", page)
    with_goodput = [head for head in heads if ">goodput<" in head]
    assert len(with_goodput) == 4
    assert all(">rejected<" in head and ">evicted<" in head for head in with_goodput)


def test_every_kind_of_chart_is_there(page: str) -> None:
    charts = Outline(page).charts
    assert charts.count("attainment-overall") == 2
    assert {name for name in charts if name.startswith("attainment")} == {
        f"attainment-{name}" for name in ("overall", "interactive", "batch", "embedding")
    }
    # Four loads: three latencies of each generating class and one of the embeddings; two systems with memory.
    assert charts.count("distribution") == 4 * (3 + 3 + 1)
    assert charts.count("memory") == 4 * 2
    assert charts.count("outcomes") == charts.count("decisions") == 4


def test_both_axes_of_every_chart_are_named(page: str) -> None:
    named = set(Outline(page).texts["text"])
    assert {"share of requests that met their SLO", "share of offered requests", "memory, MiB"} <= named
    assert {"time (log scale)", "time from the start of the measured window"} <= named


def test_an_experiment_without_runs_has_a_page() -> None:
    content = experiments.results(loads=(), partial=True)
    content["max_goodput_rate"] = []
    page = render(content, [])
    assert "No valid run: this report has no figure that may be quoted." in page
    assert Outline(page).charts == []


def test_one_load_and_one_seed_without_optional_figures_suffice() -> None:
    content = experiments.results(loads=(1.0,), seeds=(7,))
    content["max_goodput_rate"] = []
    for run in content["runs"]:
        run["memory"] = run["decisions"] = run["engine"] = None
        run["valid"] = True
    page = render(content, experiments.requests(content))
    # A single seed shows the interval of its own requests.
    assert "90 ms<small>81 to 101 ms</small>" in page
    assert "At 100 % load, tandem" in "".join(Outline(page).texts["h1"])
    assert "memory" not in Outline(page).charts


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "results.json: format=2: this version reads format 1"),
        ({"partial": "no"}, "results.json.partial: bool is needed, not str"),
        ({"slos": {"a": {"e2e_ms": "1"}}}, "results.json.slos.a.e2e_ms='1': a finite number is needed"),
        ({"systems": []}, "results.json: runs.0.system='static-split': not one of systems: []"),
    ],
)  # fmt: skip
def test_invalid_results_raise_with_their_place(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        render({**experiments.results(), **change}, [])
    assert str(caught.value) == complaint


def test_a_missing_field_is_named() -> None:
    content: Any = experiments.results()
    del content["runs"][3]["rates"]["evict"]
    with pytest.raises(BadInput, match=r"^results\.json\.runs\.3\.rates\.evict: missing; it is required$"):
        render(content, [])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"run": 99}, "run=99: results.json has 12 runs, counted from 0"),
        (
            {"outcome": "FINE"},
            "outcome='FINE': one of MET, LATE, REJECTED, EVICTED, ABORTED, FAILED is needed",
        ),
    ],
)
def test_a_request_of_no_run_raises(change: dict[str, Any], complaint: str) -> None:
    content = experiments.results(loads=(1.0,))
    first, second, *_ = experiments.requests(content)
    with pytest.raises(BadInput) as caught:
        render(content, [first, {**second, **change}])
    assert str(caught.value) == f"request 2: {complaint}"


def test_a_request_without_a_field_raises() -> None:
    content = experiments.results(loads=(1.0,))
    record = experiments.requests(content)[0]
    del record["warmup"]
    with pytest.raises(BadInput, match=r"^request 1: warmup: missing; it is required$"):
        render(content, [record])


def test_the_longest_gap_has_a_column_if_it_is_an_objective(page: str) -> None:
    assert "longest gap" not in page
    results = experiments.results()
    results["slos"]["interactive"]["gap_ms"] = 123.0
    with_gap = render(results, [])
    assert "longest gap" in with_gap and "123 ms" in with_gap


def test_the_page_names_the_gpu(page: str) -> None:
    content = experiments.results()
    content["environment"]["gpu"] = "NVIDIA H100 80GB HBM3, driver 570"
    assert "NVIDIA H100 80GB HBM3, driver 570" in render(content, experiments.requests(content))
    assert "GPU" not in Outline(page).texts["th"] + Outline(page).texts["td"]
