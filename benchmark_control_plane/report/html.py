"""How does text become HTML that nothing it shows can break? All is escaped but what `el` made."""

from collections.abc import Mapping
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | float | None
Attribute = str | float | bool | None


def el(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """`class_` is class, `stroke_width` is stroke-width. None and False leave an attribute or a child out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    return Markup("".join(c if isinstance(c, Markup) else escape(str(c)) for c in children if c is not None))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if name == "viewbox":
        name = "viewBox"
    if value is True:
        return f" {name}"
    return f' {name}="{escape(number(value) if isinstance(value, float) else str(value))}"'


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


# FOLDED blocks.py:
# What does a page consist of? Titled sections, figures with their tables, keys to colours.


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
