"""Marks of tests that need Ray, which is imported only when they run: the import alone takes seconds."""

from importlib.util import find_spec

import pytest

_IF_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")
NEEDS_RAY = [pytest.mark.long, _IF_RAY]
# On two cores two fleets that start at once do not become ready.
RUNS_A_FLEET = [pytest.mark.engine, _IF_RAY]
