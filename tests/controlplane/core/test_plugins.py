"""Plug-ins are found in the metadata of installed packages, which is read once for all slots."""

import importlib.metadata

import pytest

from controlplane.core import plugins


@pytest.fixture
def unread():
    """Forgets what was read, before and after a test."""

    def forget() -> None:
        plugins._installed.cache_clear()
        plugins._entry_points_of.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("unread")
def test_the_metadata_of_installed_packages_is_read_once(tmp_path, monkeypatch):
    folder = tmp_path / "my_policies-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[tandem.ordering]\nmine = a:b\n[tandem.admission]\nours = a:c\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reads, distributions = [], importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: reads.append(1) or distributions())
    assert "mine" in plugins.plugin_names("ordering") and "ours" in plugins.plugin_names("admission")
    assert plugins.plugin_source("ordering", "mine") == "a:b (my-policies)"
    assert plugins.plugin_names("no-slot") == frozenset()
    assert reads == [1]
