"""Saves and restores the length predictor: model, examples and calibration in one versioned file.

A file is written under a temporary name and renamed into place, so it is complete or absent. A file that
cannot be read or has another version is renamed to `*.corrupt` with a warning, and the predictor starts from
its prior.
"""

import json
import logging
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from errno import EINVAL
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any

import numpy as np

from predictors.output_length.examples import ROW, WIDTH, Table
from predictors.output_length.quantile_model import LEVELS, LengthModel, model_from_arrays

log = logging.getLogger(__name__)

VERSION = 2

# At shutdown the service saves while a training thread may still be saving.
_saving = Lock()

# What numpy and zipfile raise for a file with corrupted bytes.
_BROKEN = (
    LookupError, ValueError, TypeError, AttributeError, EOFError, OSError, RuntimeError, struct.error,
    zlib.error, zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Content of a file; `calibration` is the result of `LearnedLengths.calibration_state`.

    `untrained` counts the finished requests that the model was not trained on, also those that the table has
    no room for.
    """

    table: Table
    model: LengthModel | None = None
    calibration: Mapping[str, Any] | None = None
    untrained: int = 0


def require_writable(path: Path) -> None:
    """Raises OSError if no checkpoint can be written at `path`."""
    if path.exists() and not path.is_file():
        # Renaming onto a device would replace it.
        raise OSError(EINVAL, "not a regular file", str(path))
    partial = _partial(path)
    try:
        partial.open("wb").close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial.unlink()


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Writes the file; on OSError the previous file stays and nothing else is left."""
    arrays: dict[str, Any] = {f"table.{f.name}": getattr(checkpoint.table, f.name) for f in fields(Table)}
    if checkpoint.model is not None:
        arrays |= {f"model.{name}": array for name, array in checkpoint.model.arrays().items()}
    arrays["untrained"] = np.array(checkpoint.untrained)
    arrays["standing"] = np.frombuffer(json.dumps(checkpoint.calibration).encode(), np.uint8)
    partial = _partial(path)
    with _saving:
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, version=np.array(VERSION), **arrays)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _partial(path: Path) -> Path:
    # Several servers may save to one file: the boxes of a machine have the same configuration.
    return path.with_name(f"{path.name}.{token_hex(4)}.partial")


def read(path: Path) -> Checkpoint:
    """Reads a file that `save` wrote; raises OSError if it is absent, ValueError if it is anything else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if int(arrays.get("version", 0)) != VERSION:
            raise ValueError(f"version {arrays.get('version')}; this program reads {VERSION}")
        table = Table(**{f.name: arrays[f"table.{f.name}"] for f in fields(Table)})
        model = {n.removeprefix("model."): a for n, a in arrays.items() if n.startswith("model.")}
        calibration = json.loads(arrays["standing"].tobytes())
        _check(table, calibration)
        # Files of former versions do not say; the shipped prior, which has no trees, was trained on none.
        untrained = int(arrays.get("untrained", 0 if "trees.leaves" in model else len(table)))
        return Checkpoint(table, model_from_arrays(model) if model else None, calibration, untrained)
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        raise ValueError(f"{path}: not a saved length predictor: {error}") from error


def _check(table: Table, calibration: Mapping[str, Any] | None) -> None:
    """Raises ValueError if the table or the state has other features or levels than this version."""
    counts = [len(getattr(table, f.name)) for f in fields(Table)]
    levels = {len(offsets) for *_, offsets in (calibration or {}).get("conformal", ())}
    columns = table.numbers.shape[1], table.words.shape[1]
    if len(set(counts)) > 1 or columns != (len(ROW), WIDTH) or not levels <= {len(LEVELS)}:
        raise ValueError(
            f"row counts {counts}, columns {columns}, {sorted(levels)} levels; this version has "
            f"{(len(ROW), WIDTH)} and {len(LEVELS)}"
        )


def read_or_rename(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`; None if there is none, or if it is unreadable and was renamed."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        aside = path.with_name(f"{path.name}.corrupt")
        path.replace(aside)
        log.warning("%s; the file was renamed to %s, and length forecasts start from the prior", error, aside)
        return None
