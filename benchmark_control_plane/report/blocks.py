"""What does a page consist of? Titled sections, figures with their tables, keys to colours."""

from collections.abc import Mapping

from benchmark_control_plane.report.html import Child, Markup, el


def section(name: str, title: str, lead: str | None, *content: Markup | None) -> Markup:
    heading = el("h2", title, id=f"{name}-title")
    introduction = el("p", lead, class_="lead") if lead else None
    return el("section", heading, introduction, *content, id=name, aria_labelledby=f"{name}-title")


def figure(caption: str, *chart: Child, listed: Markup | None = None) -> Markup:
    """`listed` is the table of what the chart shows, closed at first."""
    return el("figure", el("figcaption", caption), *chart, as_table(listed) if listed else None)


def as_table(listed: Markup) -> Markup:
    return el("details", el("summary", "Figures as a table"), listed, class_="figures")


def key(parts: Mapping[str, str]) -> Markup:
    """Text by the class that colours it."""
    return el(
        "p", *(el("span", swatch(), text, class_=colour) for colour, text in parts.items()), class_="key"
    )


def swatch() -> Markup:
    return el("i", class_="swatch", aria_hidden="true")
