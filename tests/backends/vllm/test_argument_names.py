"""Engine arguments are known without importing vLLM."""

from dataclasses import fields

import pytest

from backends.vllm import argument_names

pytestmark = pytest.mark.long

pytest.importorskip("vllm", exc_type=ImportError)


@pytest.mark.engine
@pytest.mark.untimed
def test_names_read_from_the_source_are_those_of_the_class():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert argument_names.known_arguments() == {field.name for field in fields(AsyncEngineArgs)}
