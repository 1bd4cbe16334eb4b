"""Writes and reads the results of a matrix: those of its cells in one file, next to a folder per cell."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.report.results_folder import RESULTS, committed, read_results
from benchmark_control_plane.report.schema import Results, results_of

MATRIX, MATRIX_FORMAT = "matrix.json", "matrix 1"


def write_matrix(out: Path, name: str, folders: Mapping[str, Path]) -> None:
    """Writes the results of the cells in these folders, made small."""
    cells = {cell: json.loads(committed(read_results(folder))) for cell, folder in folders.items()}
    write_atomic(out / MATRIX, json.dumps({"format": MATRIX_FORMAT, "name": name, "cells": cells}) + "\n")


def matrix_cells(content: Mapping[str, Any], source: str) -> dict[str, Results]:
    """Results by cell. Raises BadInput if one does not match schema.py, or there is none."""
    cells = content.get("cells")
    if not isinstance(cells, dict) or not cells:
        raise BadInput(f"{source}.cells: at least one cell is needed")
    return {cell: results_of(results, f"{source}.cells.{cell}") for cell, results in cells.items()}


def cell_folders(out: Path) -> list[Path]:
    """Folders of the cells that a matrix has written; none for a single experiment."""
    return sorted(file.parent for file in out.glob(f"*/{RESULTS}")) if (out / MATRIX).exists() else []
