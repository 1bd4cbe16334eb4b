"""Tables of the studies of routing for docs/component-results.md."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table, wrapped
from benchmark_control_plane.report import formats

Found = Mapping[str, Mapping[str, Any]]
"""Contents of the results files by link."""

_POLICIES = (
    "TANDEM", "TANDEM_REPORT_ONLY", "ROUND_ROBIN", "LEAST_CONNECTIONS", "RANDOM", "BEST_OF_ALL",
    "PREFIX_STICKY",
)  # fmt: skip

_NEGATIVE_LOSS = (
    "A negative loss means that one router with fresh reports meets less than four routers with reports of "
    "0.2 s. At these rates the objective that is missed is the time per token, and a router predicts only "
    "the time to the first one. On two boxes at 28.2/s (seeds 1 to 3) fresh reports shorten the mean TTFT "
    "from 158 to 130 ms, of 500; requests then join the batch sooner, the mean TPOT rises from 40.9 to 42.7 "
    "ms, of 50, and 12.9 % miss it instead of 9.3: 3.1 to 3.3 points fewer are met. On 64 boxes at 28.15/s "
    "it is 1.9 to 3.1 points. The table has one seed, and states the loss at the nearer of two rates that "
    "are 5 % apart, so its columns differ by more than the numbers of boxes."
)


def routing(found: Found) -> list[str]:
    """Requests that met their objectives by policy: a row for each condition of each study."""
    rows = []
    for link, content in found.items():
        for condition, met in _conditions(content):
            shares = (f"{met[policy]:.1f}" if policy in met else formats.ABSENT for policy in _POLICIES)
            rows.append([condition, *shares, link])
    head = ["requests that met their objectives, %", *map(_name, _POLICIES), "data"]
    return markdown_table(head, rows)


def _conditions(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Condition, and the share of each policy in percent; one without reports is stated apart."""
    first = content["rows"][0]
    boxes = f"{content['boxes'][0]} boxes"
    for key, words in _KEYS.items():
        if key in first:
            groups: dict[tuple[Any, int | None], dict[str, float]] = {}
            for row in content["rows"]:
                groups.setdefault((row[key], row.get("routers")), {})[row["policy"]] = row["met_percent"]
            for (value, routers), met in groups.items():
                asked = "" if routers is None else f", {routers} {_plural('router', routers)}"
                rate = f" at {rate_of(content, value):g}/s" if "rate_per_box" in content else ""
                yield f"{boxes}{rate}, {words(value)}{asked}", met


def rate_of(content: Mapping[str, Any], cell: Any) -> float:
    """Requests per second and box in a cell or other condition; that of the study if none is stated."""
    rate: float = content.get("rate_per_box_by_cell", {}).get(cell, content["rate_per_box"])
    return rate


def _router_lost(value: Any) -> str:
    return "one of four routers down for a third of the time" if value else "four routers"


_KEYS: Mapping[str, Callable[[Any], str]] = {
    "cell": str,
    "period": lambda value: "without reports" if value is None else f"reports every {value:g} s",
    "router_lost": _router_lost,
    "boxes_down": lambda value: f"{value} of them down for a third of the time",
}
"""What a study varies, and how the page states a value of it."""


def compared_boxes(found: Found) -> list[str]:
    """Tandem by the number of boxes that a router compares, the age of the reports and the routers."""
    lines = []
    for link, content in found.items():
        column = "routers" if "routers" in content["rows"][0] else "choices"
        rows: dict[str, dict[int, float]] = {}
        for row in content["rows"]:
            compared = f"{row['choices']} boxes compared, " if column == "routers" else ""
            where = f"{compared}reports every {row['period']:g} s"
            rows.setdefault(where, {})[row[column]] = row["met_percent"]
        values = list(dict.fromkeys(row[column] for row in content["rows"]))
        of = "router" if column == "routers" else "box"
        head = [
            f"{content['boxes'][0]} boxes at {content['rate_per_box']:g}/s: met, %",
            *(f"{value} {_plural(of, value)}{'' if of == 'router' else ' compared'}" for value in values),
            "data",
        ]
        cells = ([where, *(f"{met[value]:.1f}" for value in values), link] for where, met in rows.items())
        lines += markdown_table(head, cells)
    return lines


def _plural(word: str, count: int) -> str:
    return word if count == 1 else {"box": "boxes"}.get(word, f"{word}s")


def capacity(found: Found) -> list[str]:
    """The rate per box at which 90 % met their objectives, what routing cost there, and reports, by boxes.

    Rates through Ray are beside those of the simulated boxes.
    """
    lines = []
    measured = {link: content for link, content in found.items() if "rate_per_box_at_90" in content}
    for link, content in found.items():
        if link in measured:
            continue
        boxes = list(dict.fromkeys(row["boxes"] for row in content["rows"]))
        rows = []
        for policy in dict.fromkeys(row["policy"] for row in content["rows"]):
            by_boxes = {row["boxes"]: row for row in content["rows"] if row["policy"] == policy}
            rates = (f"{by_boxes[count]['rate_per_box']:.1f}" for count in boxes)
            lost = (f"{by_boxes[count]['lost_to_routing_points']:.1f}" for count in boxes)
            rows.append([f"{_name(policy)}, requests/s and box at 90 %", *rates, link])
            rows.append([f"{_name(policy)}, points lost to routing there", *lost, link])
        sent = (f"{by_boxes[count]['report_bytes_per_second'] / 1e3:,.0f}" for count in boxes)
        rows.append(["kB of reports per second to all routers", *sent, link])
        for ray, through in measured.items():
            rows += [[*row, ray] for row in _through_ray(through, boxes)]
        if measured:
            events = {
                row["boxes"]: row["rate_per_box"] for row in content["rows"] if row["policy"] == "TANDEM"
            }
            rows.append(["tandem, simulated, times the rate of one box", *_times_one(events, boxes), link])
        head = [
            "by boxes; lost against one router with fresh reports",
            *(f"{count:,}" for count in boxes),
            "data",
        ]
        lines += markdown_table(head, rows)
        if any(row["lost_to_routing_points"] < 0 for row in content["rows"]):
            lines += [wrapped(_NEGATIVE_LOSS), ""]
    return lines


def _through_ray(content: Mapping[str, Any], boxes: Sequence[int]) -> Iterator[list[str]]:
    """Rates through Ray by boxes, and how many times one box's rate all carry.

    These boxes have another engine than the simulated ones, so that only the multiples compare.
    """
    rates = {int(count): rate for count, rate in content["rate_per_box_at_90"].items()}
    per_box = (formats.ABSENT if (rate := rates.get(count)) is None else f"{rate:.1f}" for count in boxes)
    yield [f"real boxes through Ray ({content['engine']}), requests/s and box at 90 %", *per_box]
    yield ["real boxes through Ray, times the rate of one box", *_times_one(rates, boxes)]


def _times_one(rates: Mapping[int, float | None], boxes: Iterable[int]) -> Iterator[str]:
    one = rates.get(1)
    for count in boxes:
        rate = rates.get(count)
        yield formats.ABSENT if rate is None or not one else f"{count * rate / one:,.2f}"


def _name(policy: str) -> str:
    return policy.replace("_", " ").lower()


TABLES: Sequence[tuple[Sequence[str], Callable[[Found], Iterable[str]]]] = (
    (
        (
            "fleet-policies.json", "fleet-traces.json", "fleet-staleness.json", "fleet-staleness-90.json",
            "fleet-router-lost.json", "fleet-faults.json", "fleet-conversations.json",
        ),
        routing,
    ),
    (("fleet-choices.json", "fleet-routers.json"), compared_boxes),
    (("fleet-capacity.json", "fleet-ray-capacity.json"), capacity),
)  # fmt: skip
"""File names, and the table of those of them that are kept."""
