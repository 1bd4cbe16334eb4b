"""The file of `tandem fleet`, whose keys are also the arguments of the Ray Serve application."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, ConfigError, Name, Positive
from controlplane.config.loader import parse, parse_as, read_yaml
from controlplane.config.packaged import config_path
from controlplane.config.root import Config

KindName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,39}$")]
"""Part of the names that Ray Serve and HAProxy give to the boxes of a kind."""
_Boxes = Annotated[int, Field(ge=1, le=1_000)]
_Seconds = Annotated[float, Field(ge=1, le=86_400)]


@section(frozen=True, config=STRICT)
class AutoscaleSection:
    """When boxes of a kind are added and removed; the number at the start is the least."""

    max_boxes: _Boxes
    """The most boxes. `tandem fleet plan` stays below it, too."""
    start_s: _Seconds = 120.0
    """Seconds from the start of a box until it serves; the load is predicted for so long."""
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Mean utilisation (`use` in the boxes' reports) that the number of boxes aims at."""
    lower_after_s: _Seconds = 600.0
    """Seconds for which fewer boxes must have been enough before one is removed."""


@section(frozen=True, config=STRICT)
class BoxKind:
    """Equal boxes of a fleet."""

    config: Name
    """The configuration of every box: a file, relative to this file, or a packaged name."""
    boxes: _Boxes = 2
    """Number of boxes. With one box there is no other while Ray replaces it."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of a box, which are on one node; 0 on a machine without GPUs. An LLM may use all of them."""
    cpus: Annotated[float, Field(gt=0, le=1_024)] = 1.0
    """CPU cores that Ray sets aside for a box; Ray does not limit the box to them."""
    weight: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    """Relative speed of a box: routers draw it in proportion to its weight, against those of all kinds."""
    capacity: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """For `tandem fleet plan`: measured requests per second of a box; simulated where it is not stated."""
    autoscale: AutoscaleSection | None = None
    """Without it the number of boxes does not change while they serve."""

    def __post_init__(self) -> None:
        if self.autoscale is not None and self.autoscale.max_boxes < self.boxes:
            raise ValueError(
                f"autoscale.max_boxes={self.autoscale.max_boxes} is below boxes={self.boxes}; raise it"
            )


@section(frozen=True, config=STRICT)
class FleetFile:
    """A fleet: kinds of boxes, and the routers before them."""

    kinds: Annotated[Mapping[KindName, BoxKind], Field(min_length=1)]
    """Kinds of boxes by name. A request goes to the kinds that serve its model."""
    routers: Positive = 2
    """Number of routers; each holds its own reports."""


@dataclass(frozen=True, slots=True)
class BoxFile:
    """The configuration of the boxes of a kind: content of its file, and the parsed one."""

    content: object
    config: Config


def parse_fleet(content: object, *, source: str, folder: Path) -> tuple[FleetFile, Mapping[str, BoxFile]]:
    """The fleet, and the configuration of each kind of box. Raises ConfigError.

    Args:
        content: the content of a fleet file.
        source: what the lines of errors begin with.
        folder: where a relative path of the boxes' configuration begins.
    """
    fleet = parse_as(FleetFile, content, source=source)
    files = {}
    for name, kind in fleet.kinds.items():
        given = Path(kind.config)
        path = folder / given if (folder / given).exists() else config_path(given)
        stated = read_yaml(path)
        files[name] = BoxFile(stated, parse(stated, source=str(path)))
        _require_gpus(name, kind, files[name].config, source)
    _require_equal_names(files, source)
    return fleet, files


def _require_gpus(name: str, kind: BoxKind, config: Config, source: str) -> None:
    """Raises ConfigError if the LLM of a box needs more GPUs than a box has."""
    chat = config.models.chat
    if chat is None or not kind.gpus:
        return
    needed = 1
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        stated = chat.engine.get(key, 1)
        needed *= stated if isinstance(stated, int) else 1
    if needed > kind.gpus:
        raise ConfigError(
            f"{source}: kinds.{name}.gpus={kind.gpus}: models.chat.engine of {kind.config} needs {needed} "
            "GPUs; raise gpus, or lower tensor_parallel_size or pipeline_parallel_size"
        )


def _require_equal_names(files: Mapping[str, BoxFile], source: str) -> None:
    """Raises ConfigError unless kinds that serve the same sort of model serve the same ones, and all classes.

    A router knows path and class of a request but not its body, so it takes any kind that has a chat model
    for a completion, and any with an embedding model for embeddings.
    """
    served: dict[str, tuple[str, frozenset[str]]] = {}
    for name, file in files.items():
        models = file.config.models
        sorts = {
            "chat": [models.chat.served_name] if models.chat is not None else [],
            "embedding": [model.served_name for model in models.encoders],
            "classes": list(file.config.classes),
        }
        for sort, names in sorts.items():
            if not names:
                continue
            first, expected = served.setdefault(sort, (name, frozenset(names)))
            if expected != frozenset(names):
                raise ConfigError(
                    f"{source}: kinds.{name}: its {sort} names are {', '.join(sorted(names))} and those of "
                    f"kinds.{first} are {', '.join(sorted(expected))}; kinds that serve the same requests "
                    "need the same names"
                )
