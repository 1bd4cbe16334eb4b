"""Draws SVG axes with round ticks, and maps values to pixels on linear and logarithmic scales."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from benchmark_control_plane.report.elements import el, join, number

Point = tuple[float, float]
_LETTER = 6.6
_Y_TITLE_X = 12.0


@dataclass(frozen=True)
class Scale:
    """Maps `low`..`high` to `start`..`end` pixels; values outside are clamped."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(max(v, 1e-12)) if self.is_log else v for v in (self.low, self.high, value))
        fraction = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(fraction, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        return _decades(self.low, self.high, most) if self.is_log else _round_steps(self.low, self.high, most)


@dataclass(frozen=True)
class ChartFrame:
    """Size of a chart in pixels and the scales of its axes."""

    width: int
    height: int
    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.end

    @property
    def top(self) -> float:
        return self.y.end

    @property
    def bottom(self) -> float:
        return self.y.start


def axes(
    frame: ChartFrame,
    *,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    x_title: str,
    y_title: str | None = None,
) -> Markup:
    """Horizontal grid lines, tick labels and titles of both axes; rows of bars have no title."""
    x_ticks = _apart(x_ticks, frame.x, x_text)
    rows = [
        join(
            el("line", class_="grid-line", x1=frame.left, x2=frame.right, y1=frame.y(tick), y2=frame.y(tick)),
            el("text", y_text(tick), class_="tick", x=frame.left - 6, y=frame.y(tick) + 4, text_anchor="end"),
        )
        for tick in y_ticks
    ]
    columns = [
        join(
            el(
                "line",
                class_="notch",
                x1=frame.x(tick),
                x2=frame.x(tick),
                y1=frame.bottom,
                y2=frame.bottom + 4,
            ),
            el(
                "text",
                x_text(tick),
                class_="tick",
                x=frame.x(tick),
                y=frame.bottom + 17,
                text_anchor="middle",
            ),
        )
        for tick in x_ticks
    ]
    base = el("line", class_="axis", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom)
    middle = (frame.left + frame.right) / 2
    title = el("text", x_title, class_="axis-title", x=middle, y=frame.bottom + 35, text_anchor="middle")
    return join(*rows, *columns, base, title, _y_title(frame, y_title) if y_title else None)


def _y_title(frame: ChartFrame, title: str) -> Markup:
    middle = (frame.top + frame.bottom) / 2
    turned = f"rotate(-90 {number(_Y_TITLE_X)} {number(middle)})"
    return el(
        "text", title, class_="axis-title", x=_Y_TITLE_X, y=middle, text_anchor="middle", transform=turned
    )


def _apart(ticks: Sequence[float], scale: Scale, text: Callable[[float], str]) -> list[float]:
    """Ticks with labels that do not overlap the previous one."""
    shown: list[float] = []
    for tick in ticks:
        width = _LETTER * (len(text(tick)) + 1)
        if not shown or scale(tick) - scale(shown[-1]) >= width:
            shown.append(tick)
    return shown


def line(points: Iterable[Point], **attributes: str) -> Markup:
    return el("path", d=_through(points), fill="none", **attributes)


def area(upper: Sequence[Point], lower: Sequence[Point], **attributes: str) -> Markup:
    return el("path", d=_through([*upper, *reversed(lower)]) + "Z", **attributes)


def steps(points: Sequence[Point], end_x: float) -> list[Point]:
    """Step curve: each value holds until the next point, the last until `end_x`."""
    xs = [x for x, _ in points[1:]] + [end_x]
    return [corner for (x, y), next_x in zip(points, xs, strict=True) for corner in ((x, y), (next_x, y))]


def figure(name: str, frame: ChartFrame, title: str, *content: str | None, class_: str = "") -> Markup:
    """An SVG element; `title` is its text for screen readers."""
    return el(
        "svg",
        el("title", title),
        *content,
        class_=f"chart {class_}".strip(),
        xmlns="http://www.w3.org/2000/svg",
        data_chart=name,
        viewbox=f"0 0 {frame.width} {frame.height}",
        role="img",
        aria_label=title,
    )


def spread_labels(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Heights close to the wanted ones, at least `gap` apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    placed = [0.0] * len(wanted)
    floor = top
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + gap
    ceiling = bottom
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _through(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{number(x)},{number(y)}" for x, y in points)


def _round_steps(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between them if there is room; equal steps if fewer than three remain."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for marks in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in powers for m in marks if low <= m * 10.0**p <= high]
        if len(ticks) <= most:
            break
    return ticks[:: math.ceil(len(ticks) / most)] if len(ticks) > 2 else _round_steps(low, high, most)
