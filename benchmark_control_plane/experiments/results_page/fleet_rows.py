"""Quotes of the fleet's simulator, of autoscaling and of load reports for docs/component-results.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Rows = Iterator[tuple[str, str]]
Found = Sequence[Mapping[str, Any]]


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


def conversations(content: Mapping[str, Any]) -> Rows:
    for cell, rows in _groups([row for row in content["rows"] if "cached_percent" in row], "cell"):
        shares = (
            f"{policy.replace('_', ' ').lower()} "
            + " and ".join(f"{row['cached_percent']:.0f}" for row in found)
            for policy, found in _groups(rows, "policy")
        )
        routers = " and ".join(f"{count}" for count, _ in _groups(rows, "routers"))
        yield (
            f"Tokens of earlier turns that were found in a cache on {_fleet(content)} at "
            f"{content['rate_per_box']:g}/s, {cell}, with {routers} routers",
            f"{', '.join(shares)} %",
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
        f"{_range(cells, 'attainment_points', '+.1f')} points, "
        f"TTFT P50 {_range(cells, 'ttft_p50_percent', '+.0f')} %, "
        f"P99 {_range(cells, 'ttft_p99_percent', '+.0f')} %",
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
    for row in content["by_live_requests"]:
        attached = " and ".join(f"{took:.1f}" for took in row["attach_us"].values())
        yield (
            f"Cost of a load report at {row['live']:,} live requests",
            f"{row['bytes']} bytes; attached to an answer in {attached} µs (0.5 and 0.99 quantile); made in "
            f"{row['make_us']['p50']:.0f} every 50 ms, read in {row['read_by_router_us']['p50']:.0f} µs "
            "(medians)",
        )
    for boxes, took in content["choose_us_by_boxes"].items():
        yield f"Choice of a router over {_boxes(int(boxes))}", f"{took['p50']:.1f} µs (median)"


def ray_latency(content: Mapping[str, Any]) -> Rows:
    ray, box, above = (content[name] for name in ("ray", "box", "ray_above_box"))
    for key, words in (("ttft_ms", "TTFT"), ("chunk_delay_ms", "Chunk from the engine to the client")):
        yield (
            f"{words} of a box through Ray Serve and without it, one request at a time "
            f"({content['engine']}, median of {content['requests']} each)",
            f"{ray[key]:.2f} and {box[key]:.2f} ms: {above[key]:+.2f} ms",
        )


def retry_storms(content: Mapping[str, Any]) -> Rows:
    for retries, rows in _groups(content["rows"], "retries"):
        found = (
            f"{row['clients'].replace('-', ' ')} {row['later_met_percent']:.1f}, "
            f"{row['burst_met_percent']:.0f}, {row['most_tries_per_s']:.0f} and {row['calm_after_s']:.0f} s"
            for row in rows
        )
        burst = content["burst"]
        yield (
            f"Burst of {burst['rate_per_box']:g} requests/s and box for {burst['seconds']:g} s over "
            f"{content['rate_per_box']:g} on {_fleet(content)}, {'with' if retries else 'without'} second "
            "tries of routers: later requests met, %, requests of the burst met in the end, %, most tries in "
            "a second and box after it, and time until it is calm, by what rejected clients do",
            "; ".join(found),
        )


def fairness(content: Mapping[str, Any]) -> Rows:
    for policy, rows in _groups(content["rows"], "policy"):
        found = (
            f"{'none' if row['exchange_s'] is None else format(row['exchange_s'], 'g') + ' s'} "
            f"{row['narrow_percent']:.1f}, {row['met_percent']:.1f}"
            for row in rows
        )
        yield (
            f"Two tenants of equal weight on {_fleet(content)} at {content['rate_per_box']:g} requests/s and "
            f"box, {policy.replace('_', ' ').lower()}: tokens of the tenant with a prefix, %, and requests "
            "met, %, by the time between two exchanges of counters",
            "; ".join(found),
        )


def kinds(content: Mapping[str, Any]) -> Rows:
    for share, rows in _groups(content["rows"], "indexing"):
        found = (
            f"{row['fleet']} {row['gpus']} ("
            + ", ".join(
                f"{kind} {boxes['boxes']} at {100 * boxes['utilisation']:.0f} %"
                for kind, boxes in row["kinds"].items()
                if boxes["boxes"]
            )
            + ")"
            for row in rows
        )
        yield (
            f"GPUs of an H100's roofline for {content['rate']:g} requests/s, {100 * share:g} % of them "
            "documents of 16 passages and the others answers over retrieved passages, by the kinds of boxes",
            "; ".join(found),
        )


def _groups(rows: Found, key: str) -> Iterator[tuple[Any, Found]]:
    """The rows by a value, in the order of its first rows."""
    for value in dict.fromkeys(row[key] for row in rows):
        yield value, [row for row in rows if row[key] == value]


def _fleet(content: Mapping[str, Any]) -> str:
    return f"{content['boxes'][0]} simulated boxes"


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count:,} boxes"


def _range(cells: Found, key: str, form: str = "g") -> str:
    least, most = (extreme(cell[key] for cell in cells) for extreme in (min, max))
    return f"{least:{form}}" if least == most else f"{least:{form}} to {most:{form}}"
