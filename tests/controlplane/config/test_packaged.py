"""A bare name finds a packaged configuration; a path is taken as it is."""

from pathlib import Path

import pytest

from controlplane.config import ConfigError
from controlplane.config.packaged import config_path, packaged_configs


def test_packaged_names_are_those_of_the_configs_folder():
    assert set(packaged_configs()) == {"dev", "colocated"}


def test_a_bare_name_is_the_packaged_file_and_a_path_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path(Path("dev")).name == "dev.yaml"
    assert config_path(Path("configs/dev")) == Path("configs/dev")
    assert config_path(Path("dev.yaml")) == Path("dev.yaml")
    (tmp_path / "dev").write_text("models: {}")
    assert config_path(Path("dev")) == Path("dev")


def test_an_unknown_name_lists_the_packaged_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"production: neither a file nor .*colocated, dev"):
        config_path(Path("production"))
