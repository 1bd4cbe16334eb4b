"""Quotes of the fleet's studies."""

from benchmark_control_plane.experiments.results_page import fleet_rows

LOAD = {"boxes": [8], "rate_per_box": 37.0}


def row(**values: object) -> dict[str, object]:
    return {"policy": "ROUND_ROBIN", "met_percent": 98.04, **values}


def test_staleness_has_a_row_for_each_period_and_one_without_reports() -> None:
    rows = [row(period=0.2), row(policy="TANDEM", period=0.2), row(policy="RANDOM", period=None)]
    assert list(fleet_rows.staleness({**LOAD, "rows": rows})) == [
        (
            "Routing on 8 simulated boxes at 37 requests/s, reports every 0.2 s: "
            "requests that met their objectives",
            "round robin 98.0 %, tandem 98.0 %",
        ),
        (
            "Routing on 8 simulated boxes at 37 requests/s, policies without reports: "
            "requests that met their objectives",
            "random 98.0 %",
        ),
    ]


def test_each_study_names_what_it_varies() -> None:
    quoted = [
        *fleet_rows.choices({**LOAD, "rows": [row(choices=2, period=1.0), row(choices=8, period=1.0)]}),
        *fleet_rows.routers(
            {**LOAD, "rows": [row(choices=2, period=1.0, routers=1), row(choices=2, period=1.0, routers=16)]}
        ),
        *fleet_rows.retries({**LOAD, "rows": [row(retries=True, rate_per_box=48.1)]}),
        *fleet_rows.faults({**LOAD, "rows": [row(boxes_down=3)]}),
        *fleet_rows.router_lost({**LOAD, "rows": [row(router_lost=True)]}),
        *fleet_rows.capacity(
            {
                "rows": [
                    row(boxes=1, rate_per_box=28.9, lost_to_routing_points=0),
                    row(boxes=64, rate_per_box=41, lost_to_routing_points=1.23),
                ]
            }
        ),
    ]
    assert quoted == [
        (
            "Boxes compared on 8 simulated boxes at 37 requests/s, reports every 1 s: met",
            "2 boxes 98.0 %, 8 boxes 98.0 %",
        ),
        (
            "Routers of 8 simulated boxes at 37 requests/s, 2 boxes compared, reports every 1 s: met",
            "1: 98.0 %, 16: 98.0 %",
        ),
        (
            "Second try after a refusal on 8 simulated boxes, 48.1 requests/s and box: met",
            "with 98.04 %",
        ),
        (
            "3 of 8 simulated boxes down for a third of the time: requests that met their objectives",
            "round robin 98.0 %",
        ),
        (
            "Routing on 8 simulated boxes at 37 requests/s, one of four routers down for a third of the "
            "time: requests that met their objectives",
            "round robin 98.0 %",
        ),
        (
            "Rate per box at which 90 % met their objectives, round robin, simulated",
            "1 box 28.9/s, 64 boxes 41.0/s",
        ),
        (
            "Requests lost to routing there, against one router with fresh reports, round robin",
            "1 box 0.0 points, 64 boxes 1.2 points",
        ),
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
    assert found == "5 of 9 pairs in the same order, attainment -2.6 to +1.5 points"


def test_autoscaling_states_what_as_many_boxes_all_the_time_lose() -> None:
    outcome = {"trace": "hour", "mean_boxes": 65.7, "most_boxes": 81, "overload_percent": 2.25}
    fixed = {"trace": "hour", "mean_boxes": 66.0, "most_boxes": 66, "overload_percent": 0.0}
    [(question, found)] = fleet_rows.autoscaling({"mean_load": 20.0, "rows": [outcome, fixed, fixed]})
    assert question == "Boxes by the autoscaling rule on hour, whose mean is the work of 20 boxes"
    assert found == (
        "66 on average, 81 at most, 2.2 % of the work beyond what they carry; 66 boxes all the time: 0.0 %"
    )
