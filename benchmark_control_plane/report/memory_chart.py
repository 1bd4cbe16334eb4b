"""Draws the memory of each owner over time as stacked areas, with dashed lines for the quotas.

Quotas are stacked like the memory: the area of an owner within its quota, above owners that used all of
theirs, ends at the line. An owner without a quota counts there with the memory that it held.
"""

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats, svg_axes
from benchmark_control_plane.report.elements import el, join
from benchmark_control_plane.report.schema import Memory, Results

_WIDTH, _HEIGHT = 440, 250


def memory_chart(memory: Memory, what: str) -> Markup:
    """SVG chart of the memory of one run; `what` names the run."""
    unit = memory.get("unit", "blocks")
    times = memory["times_s"]
    owners = list(memory["by_owner"])
    stacked = _stacked([memory["by_owner"][owner] for owner in owners])
    quotas = _stacked([_quota(memory, owner) for owner in owners])
    high = max([*map(max, stacked), *map(max, quotas), 1e-9])
    frame = svg_axes.ChartFrame(
        _WIDTH,
        _HEIGHT,
        svg_axes.Scale(times[0], max(times[-1], times[0] + 1e-9), 70, _WIDTH - 12),
        svg_axes.Scale(0.0, high * 1.05, _HEIGHT - 46, 14),
    )
    grid = svg_axes.axes(
        frame,
        x_ticks=frame.x.ticks(8),
        y_ticks=frame.y.ticks(5),
        x_text=lambda at: f"{at:g} s",
        y_text=formats.figure,
        x_title="time from the start of the measured window",
        y_title=f"memory, {unit}",
    )
    layers, lines = [], []
    below = [0.0] * len(times)
    for number, owner in enumerate(owners):
        held = memory["by_owner"][owner]
        tip = f"{owner}: at most {formats.figure(max(held))} {unit}"
        shape = svg_axes.area(
            _corners(frame, times, stacked[number]),
            _corners(frame, times, below),
            class_="layer",
            data_tip=tip,
        )
        layers.append(el("g", shape, class_=f"o{number}"))
        if memory["quota_by_owner"].get(owner) is not None:
            path = svg_axes.line(
                _corners(frame, times, quotas[number]), class_="quota", data_tip=f"quota of {owner}"
            )
            lines.append(el("g", path, class_=f"o{number}"))
        below = stacked[number]
    title = f"Memory by owner over time, {what}"
    return svg_axes.figure("memory", frame, title, grid, join(*layers), join(*lines))


def recorded_memory(results: Results, load: float) -> Iterator[tuple[str, Memory]]:
    """(title, memory) of the first valid run of each system that recorded its memory."""
    for system in results["systems"]:
        for run in aggregates.runs_of(results, system["name"], load):
            if run["memory"] and run["memory"]["times_s"] and run["memory"]["by_owner"]:
                yield f"{system['name']}, seed {run['seed']}", readable(run["memory"])
                break


def owner_key(memory: Memory) -> dict[str, str]:
    """Legend: text by CSS class."""
    names = {f"o{number}": owner for number, owner in enumerate(memory["by_owner"])}
    return {**names, "dashed": "quota"}


def readable(memory: Memory) -> Memory:
    """The same memory with bytes converted to MiB."""
    if memory.get("unit") != "bytes":
        return memory
    return {
        "unit": "MiB",
        "times_s": memory["times_s"],
        "by_owner": {owner: _mib(held) for owner, held in memory["by_owner"].items()},
        "quota_by_owner": {
            owner: _mib(quota) if isinstance(quota, list) else quota / 2**20
            for owner, quota in memory["quota_by_owner"].items()
        },
    }


def _mib(values: Sequence[float]) -> list[float]:
    return [value / 2**20 for value in values]


def _stacked(series: Sequence[Sequence[float]]) -> list[list[float]]:
    """Cumulative sums: each series on top of all before it."""
    total = [0.0] * len(series[0]) if series else []
    stacked = []
    for values in series:
        total = [low + value for low, value in zip(total, values, strict=True)]
        stacked.append(total)
    return stacked


def _quota(memory: Memory, owner: str) -> list[float]:
    held = memory["by_owner"][owner]
    quota = memory["quota_by_owner"].get(owner, held)
    return quota if isinstance(quota, list) else [quota] * len(held)


def _corners(
    frame: svg_axes.ChartFrame, times: Sequence[float], values: Sequence[float]
) -> list[svg_axes.Point]:
    points = [(frame.x(at), frame.y(value)) for at, value in zip(times, values, strict=True)]
    return svg_axes.steps(points, frame.right)
