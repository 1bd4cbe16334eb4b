"""No collection runs while a library is imported, and what was set before is set again."""

import gc

import pytest

from backends.garbage_collection import paused_collection


def test_collection_is_paused_and_goes_on_after_a_failure_too():
    assert gc.isenabled()
    with pytest.raises(ImportError), paused_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_was_off_stays_off():
    gc.disable()
    try:
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
