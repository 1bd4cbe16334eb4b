"""Compiles functions by numba, with a cache on disk that belongs to exactly these sources.

numba's own cache of a function notices a change of its file only, and not of the functions that it calls. So
the folder of the cache is named by a hash of all sources that are compiled here.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from controlplane.fleet import routing_rules

Function = TypeVar("Function", bound=Callable[..., Any])


def _cache_folder() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(routing_rules.__file__)):
        digest.update(file.read_bytes())
    # Compiled code is loaded from there, so it is a folder that only this user writes to.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(caches / "tandem" / f"numba-{digest.hexdigest()[:16]}")


_CACHE_FOLDER = _cache_folder()


def compiled(function: Function) -> Function:
    """The function compiled to machine code, on its first call with each combination of types.

    It must not make arrays: it counts no references to those that it is given, as these outlive the call.
    Counting took more than half of the time, since a call passes some fifty arrays and each count is atomic.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_FOLDER
    try:
        result: Function = numba.njit(cache=True, error_model="numpy", _nrt=False)(function)
    finally:
        numba.config.CACHE_DIR = before
    return result
