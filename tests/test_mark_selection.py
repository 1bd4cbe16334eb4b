"""`may_select` on sample files; what it leaves out is never selected."""

import pytest

from tests.mark_selection import may_select

OURS = {"engine", "untimed", "long", "browser", "gpu", "slow"}
FAST = "not (engine or long or browser or gpu or slow)"
SHARED = "(engine and untimed or long or browser) and not (gpu or slow)"
ALONE = "engine and not untimed and not gpu and not slow"
ENGINE_FILE = "pytestmark = [\n    pytest.mark.engine,\n    pytest.mark.untimed,\n]\n"


@pytest.mark.parametrize(
    ("source", "fast", "shared", "alone"),
    [
        ("def test_a(): ...", True, False, False),
        ("@pytest.mark.parametrize('a', [1])\ndef test_a(a): ...", True, False, False),
        ("@pytest.mark.engine\ndef test_a(): ...", True, False, True),
        ("@pytest.mark.long\ndef test_a(): ...", True, True, False),
        ("pytestmark = pytest.mark.engine\n", False, False, True),
        (ENGINE_FILE, False, True, False),
        (f"{ENGINE_FILE}@pytest.mark.gpu\ndef test_a(): ...", False, True, False),
        ("pytestmark = pytest.mark.engine\n@pytest.mark.untimed\ndef test_a(): ...", False, True, True),
        ("pytestmark = [pytest.mark.engine, pytest.mark.slow]\n", False, False, False),
        ("pytestmark = RUNS_A_FLEET\n", True, True, True),
        ("test = pytest.param(1, marks=pytest.mark.browser)", True, True, False),
    ],
)
def test_a_file_is_left_out_if_no_test_can_have_the_marks(source, fast, shared, alone):
    assert [may_select(each, source, OURS) for each in (FAST, SHARED, ALONE)] == [fast, shared, alone]


def test_a_mark_of_a_plug_in_may_be_on_any_test():
    assert may_select("hypothesis and not engine", "def test_a(): ...", OURS)
    assert not may_select("hypothesis and not engine", "pytestmark = pytest.mark.engine", OURS)
