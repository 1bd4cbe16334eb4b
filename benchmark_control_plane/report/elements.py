"""Builds HTML from Jinja2 templates for the page and from single elements for charts; all text is escaped."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

Child = str | float | None
Attribute = str | float | bool | None


def el(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """`class_` is class, `stroke_width` is stroke-width; None and False omit an attribute, None a child."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """The children in order, text escaped, None omitted."""
    return Markup("".join(escape(child) for child in children if child is not None))


def render_template(name: str, /, **values: Any) -> Markup:
    """Fills `templates/<name>.html.j2`. Raises jinja2.UndefinedError if a value is missing."""
    return Markup(_templates().get_template(f"{name}.html.j2").render(values))


def packaged_text(name: str) -> str:
    """A style sheet or script of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if name == "viewbox":
        name = "viewBox"
    # An attribute without a value is valid in HTML but not in an SVG file.
    if value is True:
        return f' {name}=""'
    return f' {name}="{escape(number(value) if isinstance(value, float) else value)}"'


def number(value: float) -> str:
    """A coordinate, rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
