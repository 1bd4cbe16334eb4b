"""The file of `tandem fleet`."""

from pathlib import Path

import pytest

from controlplane.config import ConfigError
from controlplane.config.fleet_file import AutoscaleSection, BoxKind, FleetFile, parse_fleet

BOX = "models: {chat: {model: some-model, engine: {tensor_parallel_size: 2}}}\n"
SEARCH = "models: {embeddings: [{model: some-encoder, name: e}]}\n"
BOTH = "models: {chat: {model: some-model}, embeddings: [{model: some-encoder, name: e}]}\n"
CLASSES = "classes: {gold: {ttft_ms: 100, default: true}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {"box": BOX, "search": SEARCH, "both": BOTH, "other": BOX.replace("some-model", "next-model")}
    for name, text in {**texts, "classes": SEARCH + CLASSES}.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def fleet(**kinds: object) -> dict[str, object]:
    return {"kinds": kinds}


def test_the_configurations_of_boxes_are_read_beside_the_file(folder: Path) -> None:
    content = fleet(chat={"config": "box.yaml", "gpus": 2}, search={"config": "search.yaml", "boxes": 1})
    stated, files = parse_fleet(content, source="fleet.yaml", folder=folder)
    assert stated == FleetFile(
        {"chat": BoxKind("box.yaml", boxes=2, gpus=2), "search": BoxKind("search.yaml", boxes=1)}, routers=2
    )
    assert files["chat"].content == {
        "models": {"chat": {"model": "some-model", "engine": {"tensor_parallel_size": 2}}}
    }
    assert files["search"].config.models.chat is None


def test_kinds_that_serve_the_same_models_go_together(folder: Path) -> None:
    content = fleet(
        both={"config": "both.yaml"}, chat={"config": "box.yaml", "gpus": 2}, e={"config": "search.yaml"}
    )
    _, files = parse_fleet(content, source="fleet.yaml", folder=folder)
    assert list(files) == ["both", "chat", "e"]


def test_a_packaged_configuration_has_a_name(tmp_path: Path) -> None:
    _, files = parse_fleet(fleet(box={"config": "dev", "gpus": 0}), source="fleet.yaml", folder=tmp_path)
    content = files["box"].content
    assert isinstance(content, dict) and "models" in content


def test_a_number_that_changes_has_bounds(folder: Path) -> None:
    content = fleet(box={"config": "both.yaml", "autoscale": {"max_boxes": 8, "start_s": 90}})
    stated, _ = parse_fleet(content, source="fleet.yaml", folder=folder)
    assert stated.kinds["box"].autoscale == AutoscaleSection(8, start_s=90.0, utilisation=0.7)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fleet(box={"config": "box.yaml", "boxs": 3}), "kinds.box.boxs: unknown key; did you mean 'boxes'?"),
        (fleet(box={}), "fleet.yaml: kinds.box.config: missing"),
        ({}, "fleet.yaml: kinds: missing"),
        ({"kinds": {}}, "fleet.yaml: kinds"),
        (fleet(box={"config": "box.yaml", "boxes": 0}), "fleet.yaml: kinds.box.boxes=0"),
        (fleet(box={"config": "both.yaml", "weight": 0}), "fleet.yaml: kinds.box.weight=0"),
        (fleet(box={"config": "none.yaml"}), "none.yaml: No such file"),
        (fleet(Box={"config": "box.yaml"}), "kinds.Box"),
        (fleet(box={"config": "box.yaml"}), "kinds.box.gpus=1: models.chat.engine of box.yaml needs 2 GPUs"),
        (
            fleet(box={"config": "both.yaml", "boxes": 4, "autoscale": {"max_boxes": 3}}),
            "autoscale.max_boxes=3 is below boxes=4; raise it",
        ),
        (
            fleet(a={"config": "box.yaml", "gpus": 2}, b={"config": "other.yaml", "gpus": 2}),
            "kinds.b: its chat names are next-model and those of kinds.a are some-model",
        ),
        (
            fleet(a={"config": "box.yaml", "gpus": 2}, b={"config": "classes.yaml"}),
            "kinds.b: its classes names are gold and those of kinds.a are",
        ),
    ],
)
def test_a_mistake_is_named(folder: Path, content: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_fleet(content, source="fleet.yaml", folder=folder)
    assert expected in str(error.value)
