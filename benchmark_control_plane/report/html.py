"""How does text become HTML that nothing it shows can break? All is escaped but what `el` made."""

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
