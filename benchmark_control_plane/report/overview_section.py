"""What did the experiment find? The sentence, what must be known to quote it, and its curves."""

from benchmark_control_plane.report import aggregates, formats, headline, tables
from benchmark_control_plane.report.attainment_chart import attainment_chart
from benchmark_control_plane.report.frontier_chart import frontier_chart
from benchmark_control_plane.report.html import Markup, as_table, el, figure, join, section
from benchmark_control_plane.report.schema import Results, RunFigures
from benchmark_control_plane.report.series_style import marker, sign

_UNBROKEN = "\N{NO-BREAK SPACE}%"


def opening(results: Results) -> Markup:
    return el(
        "header",
        el("p", "Tandem benchmark · ", results["experiment"]["name"], class_="eyebrow"),
        el("h1", headline.headline(results)),
        el("p", results["experiment"]["question"], class_="question"),
        *_warnings(results),
        _cards(results),
    )


def legend(results: Results) -> Markup:
    """Pressing a name dims the others in every chart."""
    buttons = []
    for number, system in enumerate(results["systems"]):
        stroke = el("line", x1=0, x2=26, y1=8, y2=8, class_="line")
        sample = el(
            "svg", stroke, marker(number, 13, 8, class_="mark"), viewbox="0 0 26 16", aria_hidden="true"
        )
        buttons.append(
            el(
                "button",
                sample,
                system["name"],
                type="button",
                class_=sign(number),
                data_system=number,
                aria_pressed="false",
                title=system["description"],
            )
        )
    return el("nav", *buttons, class_="legend", aria_label="Systems")


def attainment(results: Results) -> Markup:
    if not aggregates.loads(results):
        return join()
    goals = ", ".join(map(formats.share, aggregates.targets(results)))
    lead = (
        "The share of all offered requests that met their objective; a rejected or lost request is a miss. "
        "Lines are medians over "
        f"{formats.several(len(aggregates.seeds(results)), 'seed')}, bands their range, "
        "dots the single seeds." + (f" Dashed: the targets ({goals})." if goals else "")
    )
    hero = (
        attainment_chart(results, aggregates.OVERALL, width=1040, height=400, has_labels=True),
        attainment_chart(results, aggregates.OVERALL, width=340, height=270, has_labels=False),
    )
    by_class = (
        figure(
            name,
            attainment_chart(results, name, width=340, height=230, has_labels=False),
            listed=tables.attainment_table(results, name),
        )
        for name in aggregates.classes(results)
    )
    listed = tables.attainment_table(results, aggregates.OVERALL)
    return section(
        "attainment",
        "Attainment against load",
        lead,
        el("div", figure("all classes", *hero, listed=listed), class_="hero"),
        el("div", *by_class, class_="grid"),
        _frontier(results),
    )


def _frontier(results: Results) -> Markup | None:
    if not results["max_goodput_rate"]:
        return None
    charts = (
        figure(f"{formats.share(goal)} of objectives met", frontier_chart(results, goal))
        for goal in aggregates.targets(results)
    )
    return join(
        el("h3", "Highest rate that keeps the promise"),
        el("div", *charts, class_="grid broad"),
        as_table(tables.frontier_table(results)),
    )


def _warnings(results: Results) -> list[Markup]:
    said = []
    if results["partial"]:
        what = "The experiment was interrupted. What follows is what it had measured by then."
        said.append(_warning("Partial.", what))
    if refused := aggregates.invalid(results):
        title = f"{len(refused)} of {len(results['runs'])} runs are not valid and count in no figure."
        said.append(_warning(title, el("ul", *(el("li", _place(run), ": ", _why(run)) for run in refused))))
    return said


def _warning(title: str, what: str) -> Markup:
    return el("div", el("strong", title), " ", what, class_="warning", role="alert")


def _place(run: RunFigures) -> str:
    return f"{run['system']}, {formats.load(run['load'])} load, seed {run['seed']}"


def _why(run: RunFigures) -> str:
    return run["why_invalid"] or "no reason given"


def _cards(results: Results) -> Markup | None:
    """The figures of the headline with what belongs beside them: losses, and the spread of seeds."""
    system = aggregates.ours(results)
    if system is None or not aggregates.loads(results):
        return None
    cards = [*_rate_cards(results, system["name"]), *_load_cards(results, system["name"])]
    cells = (
        el("div", el("dt", name.replace(" %", _UNBROKEN)), el("dd", value, el("small", beside)))
        for name, value, beside in cards
    )
    return el("dl", *cells, class_="cards")


def _rate_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    cards = []
    for goal in aggregates.targets(results):
        mine, best = aggregates.frontier(results, system, goal), aggregates.best_baseline(results, goal)
        if mine and mine["rps"]:
            beside = "no baseline reached it"
            if best and best["rps"]:
                beside = f"{headline.ratio_text(results, mine, best)} {best['system']}"
            least = "\N{GREATER-THAN OR EQUAL TO} " if aggregates.is_limit(results, mine) else ""
            cards.append(
                (
                    f"rate at {formats.share(goal)} attainment",
                    least + formats.rate(mine["rps"]),
                    beside,
                )
            )
    return cards


def _load_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    """Under the highest load."""
    load = aggregates.loads(results)[-1]
    runs = aggregates.runs_of(results, system, load)
    under = f"at {formats.load(load)} load"
    cards = []
    for name in (aggregates.OVERALL, *aggregates.classes(results)[:1]):
        if over := aggregates.attained(runs, name):
            ends = f"over {formats.several(over.count, 'seed')}"
            if over.low < over.high:
                ends = f"{formats.share(over.low)} to {formats.share(over.high)} {ends}"
            cards.append((f"{name} met {under}", formats.share(over.median), ends))
    reject = aggregates.over_seeds(runs, lambda run: run["rates"]["reject"])
    evict = aggregates.over_seeds(runs, lambda run: run["rates"]["evict"])
    if reject and evict:
        evicted = f"evicted {formats.share(evict.median)}"
        cards.append((f"rejected {under}", formats.share(reject.median), evicted))
    return cards
