"""Expands the `matrix` of an experiment file into cells, each an experiment of its own.

    matrix:
      AXIS:
        VALUE: {differences, as in a file that extends another}

The first cell has the first value of every axis. Each further value makes one cell, with the first values of
all other axes, so the number of cells grows with the sum of the values and not with their product.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import Experiment, merge, parsed, read_extended
from controlplane.config import ConfigError

MATRIX = "matrix"


def read_cells(path: Path, data: Path) -> dict[str, Experiment]:
    """Experiments of a file by the names of their cells; a file without a matrix has one, named "".

    Raises BadInput with one line per mistake of the first cell that has any.
    """
    try:
        content, text = read_extended(path)
        if not isinstance(content, dict) or MATRIX not in content:
            return {"": Experiment(parsed(content, path), text, data)}
        matrix = _checked(content.pop(MATRIX), path)
        cells = {}
        for cell, differences in _cells(matrix):
            own = merge(content, differences) | {"name": f"{content.get('name')}: {cell}"}
            shown = yaml.safe_dump(own, sort_keys=False, default_flow_style=None, allow_unicode=True)
            cells[cell] = Experiment(parsed(own, Path(f"{path}: {cell}")), shown, data)
        return cells
    except ConfigError as error:
        raise BadInput(str(error)) from error


def _cells(matrix: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    first = {axis: next(iter(values)) for axis, values in matrix.items()}
    for axis, values in matrix.items():
        for value in values:
            if value != first[axis] or axis == next(iter(matrix)):
                chosen = first | {axis: value}
                differences: dict[str, Any] = {}
                for each, stated in chosen.items():
                    differences = merge(differences, matrix[each][stated])
                yield f"{axis} {value}", differences


def _checked(matrix: object, path: Path) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(matrix, dict) or not matrix:
        raise ConfigError(
            f"{path}: {MATRIX}: should be a mapping of at least one axis: {{axis: {{value: {{…}}}}}}"
        )
    for axis, values in matrix.items():
        if not isinstance(values, dict) or not values:
            raise ConfigError(f"{path}: {MATRIX}.{axis}: should be a mapping of at least one value")
        for value, differences in values.items():
            if not isinstance(value, str) or not isinstance(differences, dict):
                rule = "give a text in quotes, and a mapping of differences or {}"
                raise ConfigError(f"{path}: {MATRIX}.{axis}.{value}: {rule}")
    return matrix
