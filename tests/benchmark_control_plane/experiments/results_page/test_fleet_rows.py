"""Quotes and tables of the fleet's studies."""

from benchmark_control_plane.experiments.results_page import fleet_rows, fleet_tables

LOAD = {"boxes": [8], "rate_per_box": 37.0}


def row(**values: object) -> dict[str, object]:
    return {"policy": "ROUND_ROBIN", "met_percent": 98.04, **values}


def test_routing_has_a_row_for_each_condition_and_one_without_reports() -> None:
    stale = [row(period=0.2), row(policy="TANDEM", period=0.2), row(policy="RANDOM", period=None)]
    found = {
        "[a]": {**LOAD, "rows": stale},
        "[b]": {"boxes": [8], "rows": [row(cell="equal boxes")]},
        "[c]": {**LOAD, "rows": [row(boxes_down=3)]},
        "[d]": {**LOAD, "rows": [row(router_lost=True)]},
        "[e]": {**LOAD, "rows": [row(cell="turns", routers=1), row(cell="turns", routers=4)]},
        "[f]": {**LOAD, "rate_per_box_by_cell": {"code": 9.0}, "rows": [row(cell="code")]},
    }
    assert [line.strip("| ").split(" | ") for line in fleet_tables.routing(found)[2:-1]] == [
        ["8 boxes at 37/s, reports every 0.2 s", "98.0", "—", "98.0", "—", "—", "—", "—", "[a]"],
        ["8 boxes at 37/s, without reports", "—", "—", "—", "—", "98.0", "—", "—", "[a]"],
        ["8 boxes, equal boxes", "—", "—", "98.0", "—", "—", "—", "—", "[b]"],
        ["8 boxes at 37/s, 3 of them down for a third of the time", "—", "—", "98.0", "—", "—", "—", "—",
         "[c]"],
        ["8 boxes at 37/s, one of four routers down for a third of the time", "—", "—", "98.0", "—", "—",
         "—", "—", "[d]"],
        ["8 boxes at 37/s, turns, 1 router", "—", "—", "98.0", "—", "—", "—", "—", "[e]"],
        ["8 boxes at 37/s, turns, 4 routers", "—", "—", "98.0", "—", "—", "—", "—", "[e]"],
        ["8 boxes at 9/s, code", "—", "—", "98.0", "—", "—", "—", "—", "[f]"],
    ]  # fmt: skip


def test_boxes_compared_and_routers_are_columns() -> None:
    choices = {**LOAD, "rows": [row(choices=2, period=1.0), row(choices=8, period=1.0)]}
    routers = {**LOAD, "rows": [row(choices=2, period=1.0, routers=count) for count in (1, 16)]}
    lines = [
        line for line in fleet_tables.compared_boxes({"[a]": choices, "[b]": routers}) if "--" not in line
    ]
    assert lines == [
        "| 8 boxes at 37/s: met, % | 2 boxes compared | 8 boxes compared | data |",
        "| reports every 1 s | 98.0 | 98.0 | [a] |",
        "",
        "| 8 boxes at 37/s: met, % | 1 router | 16 routers | data |",
        "| 2 boxes compared, reports every 1 s | 98.0 | 98.0 | [b] |",
        "",
    ]


def test_the_rate_per_box_and_what_routing_costs_are_rows() -> None:
    rows = [
        row(boxes=1, rate_per_box=28.9, lost_to_routing_points=0, report_bytes_per_second=6_800),
        row(boxes=1_024, rate_per_box=41, lost_to_routing_points=1.23, report_bytes_per_second=6_963_200),
    ]
    lines = fleet_tables.capacity({"[a]": {"rows": rows}})
    assert lines[0].endswith(" | 1 | 1,024 | data |")
    assert lines[2:-1] == [
        "| round robin, requests/s and box at 90 % | 28.9 | 41.0 | [a] |",
        "| round robin, points lost to routing there | 0.0 | 1.2 | [a] |",
        "| kB of reports per second to all routers | 7 | 6,963 | [a] |",
    ]


def test_rates_through_ray_are_beside_those_of_the_simulated_boxes() -> None:
    simulated = [
        row(
            boxes=count,
            policy="TANDEM",
            rate_per_box=rate,
            lost_to_routing_points=-0.1,
            report_bytes_per_second=1,
        )
        for count, rate in ((1, 28.0), (2, 28.7), (8, 28.0))
    ]
    through = {"engine": "steps of 50 ms", "rate_per_box_at_90": {"1": 16.9, "2": 16.7, "4": None}}
    lines = fleet_tables.capacity({"[a]": {"rows": simulated}, "[b]": through})
    assert lines[5:8] == [
        "| real boxes through Ray (steps of 50 ms), requests/s and box at 90 % | 16.9 | 16.7 | — | [b] |",
        "| real boxes through Ray, times the rate of one box | 1.00 | 1.98 | — | [b] |",
        "| tandem, simulated, times the rate of one box | 1.00 | 2.05 | 8.00 | [a] |",
    ]
    assert lines[9].startswith("A negative loss means")


def test_what_ray_adds_is_stated_for_the_first_token_and_a_chunk() -> None:
    times = {"ttft_ms": 68.3, "chunk_delay_ms": 0.81}
    above = {"ttft_ms": 2.31, "chunk_delay_ms": 0.26}
    content = {"engine": "steps of 50 ms", "requests": 60, "ray": times, "box": times, "ray_above_box": above}
    (first, chunk) = fleet_rows.ray_latency(content)
    assert first[0].startswith("TTFT of a box") and first[1] == "68.30 and 68.30 ms: +2.31 ms"
    assert chunk[1] == "0.81 and 0.81 ms: +0.26 ms"


def test_a_second_try_is_compared_with_none() -> None:
    rows = [row(retries=True, rate_per_box=48.1)]
    assert list(fleet_rows.retries({**LOAD, "rows": rows})) == [
        ("Second try after a refusal on 8 simulated boxes, 48.1 requests/s and box: met", "with 98.04 %")
    ]


def test_kinds_of_boxes_are_compared_by_the_share_of_documents() -> None:
    chat, search, none = ({"boxes": boxes, "utilisation": 0.755} for boxes in (12, 1, 0))
    fleets = {"mixed": {"both": chat}, "dedicated": {"chat": chat, "search": search, "both": none}}
    rows = [{"indexing": 0.1, "fleet": name, "gpus": 13, "kinds": of} for name, of in fleets.items()]
    ((what, found),) = fleet_rows.kinds({"rate": 1000.0, "rows": rows})
    assert what.startswith("GPUs of an H100's roofline for 1000 requests/s, 10 % of them documents")
    assert found == "mixed 13 (both 12 at 76 %); dedicated 13 (chat 12 at 76 %, search 1 at 76 %)"


def test_what_turns_find_in_caches_is_stated_by_policy_and_routers() -> None:
    rows = [
        row(cell="turns", policy=policy, routers=routers, cached_percent=40.4 + routers)
        for policy in ("TANDEM", "PREFIX_STICKY")
        for routers in (1, 4)
    ]
    assert list(fleet_rows.conversations({**LOAD, "rows": [*rows, row(cell="one turn", routers=1)]})) == [
        (
            "Tokens of earlier turns that were found in a cache on 8 simulated boxes at 37/s, turns, with 1 "
            "and 4 routers",
            "tandem 41 and 44, prefix sticky 41 and 44 %",
        )
    ]


def test_accuracy_is_the_range_over_the_cells() -> None:
    cells = [
        {
            "boxes": 3,
            "rate_per_box": 32.0,
            "attainment_points": points,
            "ttft_p50_percent": -49.6,
            "ttft_p99_percent": -9.4,
        }
        for points in (-2.6, 1.51)
    ]
    [(question, found)] = fleet_rows.accuracy({"cells": cells})
    assert question.endswith("32 requests/s and box")
    assert found == "2 cells, boxes 3: attainment -2.6 to +1.5 points, TTFT P50 -50 %, P99 -9 %"
    [(_, found)] = fleet_rows.order({"cells": cells, "order": {"pairs": 9, "same_order": 5}})
    assert found.startswith("5 of 9 pairs in the same order, attainment -2.6 to +1.5 points, TTFT P50 -50 %,")


def test_autoscaling_states_what_as_many_boxes_all_the_time_lose() -> None:
    outcome = {"trace": "hour", "mean_boxes": 65.7, "most_boxes": 81, "overload_percent": 2.25}
    fixed = {"trace": "hour", "mean_boxes": 66.0, "most_boxes": 66, "overload_percent": 0.0}
    [(question, found)] = fleet_rows.autoscaling({"mean_load": 20.0, "rows": [outcome, fixed, fixed]})
    assert question == "Boxes by the autoscaling rule on hour, whose mean is the work of 20 boxes"
    assert found == (
        "66 on average, 81 at most, 2.2 % of the work beyond what they carry; 66 boxes all the time: 0.0 %"
    )


def test_the_cost_of_a_report_is_stated_by_live_requests() -> None:
    took = {"p50": 1.04, "p99": 2.0}
    live = {"live": 1_000, "bytes": 340, "attach_us": took, "make_us": took, "read_by_router_us": took}
    content = {"by_live_requests": [live], "choose_us_by_boxes": {"8": took}}
    assert list(fleet_rows.report_cost(content)) == [
        (
            "Cost of a load report at 1,000 live requests",
            "340 bytes; attached to an answer in 1.0 and 2.0 µs (0.5 and 0.99 quantile); made in 1 every 50 "
            "ms, read in 1 µs (medians)",
        ),
        ("Choice of a router over 8 boxes", "1.0 µs (median)"),
    ]


def test_storms_are_compared_by_what_clients_do() -> None:
    row = {
        "clients": "whole-seconds",
        "retries": True,
        "later_met_percent": 99.06,
        "burst_met_percent": 80.4,
        "most_tries_per_s": 41.2,
        "calm_after_s": 3.0,
    }
    burst = {"at": 10.0, "seconds": 3.0, "rate_per_box": 60.0}
    [(question, found)] = fleet_rows.retry_storms({**LOAD, "burst": burst, "rows": [row]})
    assert question.startswith(
        "Burst of 60 requests/s and box for 3 s over 37 on 8 simulated boxes, with second"
    )
    assert found == "whole seconds 99.1, 80, 41 and 3 s"


def test_fairness_is_stated_by_the_age_of_the_counters() -> None:
    rows = [
        {"policy": "PREFIX_STICKY", "exchange_s": age, "narrow_percent": 16.66, "met_percent": 60.0}
        for age in (None, 0.2)
    ]
    [(question, found)] = fleet_rows.fairness({**LOAD, "rows": rows})
    assert "prefix sticky: tokens of the tenant with a prefix" in question
    assert found == "none 16.7, 60.0; 0.2 s 16.7, 60.0"
