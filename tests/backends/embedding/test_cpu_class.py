"""The nice level of the server's session, as Linux reports it."""

import pytest

from backends.embedding import cpu_class


@pytest.mark.parametrize(
    ("reported", "level"),
    [("/autogroup-9 nice -20\n", "-20"), ("", "0"), (None, "0")],
    ids=["a session with a level", "the machine's first session", "no autogroups"],
)
def test_own_session_level(tmp_path, monkeypatch, reported, level):
    file = tmp_path / "autogroup"
    if reported is not None:
        file.write_text(reported)
    monkeypatch.setattr(cpu_class, "_OWN_AUTOGROUP_FILE", file)
    assert cpu_class._own_autogroup() == level
