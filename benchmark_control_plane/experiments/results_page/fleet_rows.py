"""Quotes of the studies of routing, of the fleet's simulator and of load reports for docs/results.md."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Rows = Iterator[tuple[str, str]]
Found = Sequence[Mapping[str, Any]]


def policies(content: Mapping[str, Any]) -> Rows:
    for cell, found in _groups(content["rows"], "cell"):
        yield f"Routing on {_fleet(content)}, {cell}: requests that met their objectives", _by_policy(found)


def staleness(content: Mapping[str, Any]) -> Rows:
    for period, found in _groups(content["rows"], "period"):
        reports = "policies without reports" if period is None else f"reports every {period:g} s"
        yield f"Routing on {_load(content)}, {reports}: requests that met their objectives", _by_policy(found)


def choices(content: Mapping[str, Any]) -> Rows:
    for period, found in _groups(content["rows"], "period"):
        compared = (f"{row['choices']} boxes {row['met_percent']:.1f} %" for row in found)
        yield f"Boxes compared on {_load(content)}, reports every {period:g} s: met", ", ".join(compared)


def routers(content: Mapping[str, Any]) -> Rows:
    for choices, compared in _groups(content["rows"], "choices"):
        for period, found in _groups(compared, "period"):
            by_routers = (f"{row['routers']}: {row['met_percent']:.1f} %" for row in found)
            yield (
                f"Routers of {_load(content)}, {choices} boxes compared, reports every {period:g} s: met",
                ", ".join(by_routers),
            )


def autoscaling(content: Mapping[str, Any]) -> Rows:
    for trace, (scaled, average, _) in _groups(content["rows"], "trace"):
        yield (
            f"Boxes by the autoscaling rule on {trace}, whose mean is the work of {content['mean_load']:g} "
            "boxes",
            f"{scaled['mean_boxes']:.0f} on average, {scaled['most_boxes']} at most, "
            f"{scaled['overload_percent']:.1f} % of the work beyond what they carry; "
            f"{average['most_boxes']} boxes all the time: {average['overload_percent']:.1f} %",
        )


def retries(content: Mapping[str, Any]) -> Rows:
    for rate, found in _groups(content["rows"], "rate_per_box"):
        both = (f"{'with' if row['retries'] else 'without'} {row['met_percent']:.2f} %" for row in found)
        yield (
            f"Second try after a refusal on {_fleet(content)}, {rate:g} requests/s and box: met",
            ", ".join(both),
        )


def faults(content: Mapping[str, Any]) -> Rows:
    down = content["rows"][0]["boxes_down"]
    yield (
        f"{down} of {_fleet(content)} down for a third of the time: requests that met their objectives",
        _by_policy(content["rows"]),
    )


def router_lost(content: Mapping[str, Any]) -> Rows:
    for is_lost, found in _groups(content["rows"], "router_lost"):
        routers = "one of four routers down for a third of the time" if is_lost else "four routers"
        yield f"Routing on {_load(content)}, {routers}: requests that met their objectives", _by_policy(found)


def capacity(content: Mapping[str, Any]) -> Rows:
    for policy, found in _groups(content["rows"], "policy"):
        yield (
            f"Rate per box at which 90 % met their objectives, {_name(policy)}, simulated",
            ", ".join(f"{_boxes(row['boxes'])} {row['rate_per_box']:.1f}/s" for row in found),
        )
        yield (
            f"Requests lost to routing there, against one router with fresh reports, {_name(policy)}",
            ", ".join(f"{_boxes(row['boxes'])} {row['lost_to_routing_points']:.1f} points" for row in found),
        )


def accuracy(content: Mapping[str, Any]) -> Rows:
    cells = content["cells"]
    yield (
        f"Event model against the gate-exact simulation, {_range(cells, 'rate_per_box')} requests/s and box",
        f"{len(cells)} cells, boxes {_range(cells, 'boxes')}: attainment "
        f"{_range(cells, 'attainment_points', '+.1f')} points, "
        f"TTFT P50 {_range(cells, 'ttft_p50_percent', '+.0f')} %, "
        f"P99 {_range(cells, 'ttft_p99_percent', '+.0f')} %",
    )


def order(content: Mapping[str, Any]) -> Rows:
    cells, pairs = content["cells"], content["order"]
    yield (
        f"Event model against the gate-exact simulation, {len(cells)} policies on {_range(cells, 'boxes')} "
        "boxes",
        f"{pairs['same_order']} of {pairs['pairs']} pairs in the same order, attainment "
        f"{_range(cells, 'attainment_points', '+.1f')} points",
    )


def scale(content: Mapping[str, Any]) -> Rows:
    for row in content["rows"]:
        cells = "one fleet" if row["cells"] == 1 else f"{row['cells']} cells"
        yield (
            f"Simulation of {_boxes(row['boxes'])} for {row['seconds']:g} s at {content['rate_per_box']:g} "
            f"requests/s and box, {cells}, {row['processes']} process{'es' if row['processes'] > 1 else ''}",
            f"{row['requests'] / 1e6:,.2f} million requests, {row['wall_seconds']:,.1f} s "
            f"({row['cpu_seconds']:,.1f} s of CPU time), {row['peak_memory_mib']:,} MiB, "
            f"{row['met_percent']:.2f} % met",
        )


def report_cost(content: Mapping[str, Any]) -> Rows:
    for row in content["by_running_requests"]:
        yield (
            f"Cost of a load report at {row['running']} running requests",
            f"{row['bytes']} bytes; made in {row['make_us']['p50']:.0f} µs, attached in "
            f"{row['attach_us']['p50']:.1f} µs, read in {row['read_by_router_us']['p50']:.0f} µs (medians)",
        )
    for boxes, took in content["choose_us_by_boxes"].items():
        yield f"Choice of a router over {_boxes(int(boxes))}", f"{took['p50']:.1f} µs (median)"


def _groups(rows: Found, key: str) -> Iterator[tuple[Any, Found]]:
    """The rows by a value, in the order of its first rows."""
    for value in dict.fromkeys(row[key] for row in rows):
        yield value, [row for row in rows if row[key] == value]


def _by_policy(rows: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{_name(row['policy'])} {row['met_percent']:.1f} %" for row in rows)


def _name(policy: str) -> str:
    return policy.replace("_", " ").lower()


def _fleet(content: Mapping[str, Any]) -> str:
    return f"{content['boxes'][0]} simulated boxes"


def _load(content: Mapping[str, Any]) -> str:
    return f"{_fleet(content)} at {content['rate_per_box']:g} requests/s"


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count:,} boxes"


def _range(cells: Found, key: str, form: str = "g") -> str:
    least, most = (extreme(cell[key] for cell in cells) for extreme in (min, max))
    return f"{least:{form}}" if least == most else f"{least:{form}} to {most:{form}}"
