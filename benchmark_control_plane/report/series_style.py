"""Assigns each system a colour, a marker and a dash pattern, so that colour is never the only difference."""

from markupsafe import Markup

from benchmark_control_plane.report.elements import el

COLOURS = 8
_SHAPES = ("circle", "square", "triangle", "diamond", "cross", "bar")


def sign(number: int) -> str:
    """CSS classes of a system: its colour, and its number for the script."""
    return f"s{number % COLOURS} n{number}"


def marker(number: int, x: float, y: float, **attributes: str) -> Markup:
    """Marker of a system; colours and shapes repeat at different periods, so 24 systems stay distinct."""
    match _SHAPES[number % len(_SHAPES)]:
        case "circle":
            return el("circle", cx=x, cy=y, r=4.0, **attributes)
        case "square":
            return el("rect", x=x - 3.6, y=y - 3.6, width=7.2, height=7.2, **attributes)
        case "triangle":
            return el("path", d=f"M{x:.1f},{y - 4.8:.1f}l4.8,8.4h-9.6Z", **attributes)
        case "diamond":
            return el("path", d=f"M{x:.1f},{y - 5.2:.1f}l5.2,5.2l-5.2,5.2l-5.2,-5.2Z", **attributes)
        case "cross":
            return el("path", d=cross(x, y), **attributes, data_open=True)
        case _:
            return el("rect", x=x - 5.0, y=y - 2.4, width=10.0, height=4.8, **attributes)


def cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
