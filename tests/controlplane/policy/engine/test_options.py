"""Options keep the types of their defaults through any number of changes."""

import pytest

from controlplane.policy.engine.options import EngineOptions


def test_a_time_that_was_a_whole_number_may_become_a_fraction():
    options = EngineOptions().changed({"priority_head_start_ms": 1_000})
    assert options.changed({"priority_head_start_ms": 1_000.5}).priority_head_start_ms == 1_000.5
    with pytest.raises(ValueError, match=r"settle_steps=1.5: a whole number is needed"):
        options.changed({"settle_steps": 1.5})
