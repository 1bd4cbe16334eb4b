"""Finds plug-ins: names that installed packages register as entry points in the group `tandem.<slot>`.

Nothing is imported before a name is used, and the installed metadata is read once per process.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

_installed = cache(entry_points)


@cache
def _entry_points_of(slot: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in _installed().select(group=f"tandem.{slot}"):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def plugin_names(slot: str) -> frozenset[str]:
    """Names that installed distributions provide for `slot`."""
    return frozenset(_entry_points_of(slot))


def plugin_source(slot: str, name: str) -> str:
    """Returns the origin of a plug-in for messages: `module:attribute (distribution)`."""
    points = _entry_points_of(slot)[name]
    return " and ".join(f"{p.value} ({p.dist.name if p.dist else 'unknown distribution'})" for p in points)


def load_plugin(slot: str, name: str) -> Any:
    """Imports the plug-in.

    Raises ValueError if two distributions provide the name, if the import fails, or if the object found is
    not callable.
    """
    points = _entry_points_of(slot)[name]
    source = plugin_source(slot, name)
    if len(points) > 1:
        raise ValueError(f"{slot} {name!r}: provided by {source}; uninstall all but one of them")
    try:
        plugin = points[0].load()
    except Exception as error:
        raise ValueError(f"{slot} {name!r}: {source} cannot be imported: {error!r}") from error
    if not callable(plugin):
        raise ValueError(f"{slot} {name!r}: {source} is not callable; point it to a function or a class")
    return plugin
