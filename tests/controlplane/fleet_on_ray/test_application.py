"""The Ray Serve application as it is built, without a cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.config import ConfigError
from tests.controlplane.fleet_on_ray.ray_marks import NEEDS_RAY

pytestmark = NEEDS_RAY

BOX = "models: {chat: {model: some-model}}\nserver: {drain_ms: 5000}\n"
SEARCH = "models: {embeddings: [{model: some-encoder}]}\n"


def test_the_application_has_boxes_and_routers_with_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.setenv(ROUTER_KEY, "our-key")
    (tmp_path / "box.yaml").write_text(BOX, encoding="utf-8")
    kind = {"config": str(tmp_path / "box.yaml"), "boxes": 3, "gpus": 2, "cpus": 4, "weight": 2.5}
    built = fleet({"kinds": {"box": kind}, "routers": 1})
    boxes, routers = built._bound_deployment, built._ingress_request_router._bound_deployment
    assert (boxes.num_replicas, routers.num_replicas) == (3, 1)
    assert {key: boxes.ray_actor_options[key] for key in ("num_cpus", "num_gpus")} == {
        "num_cpus": 4,
        "num_gpus": 2,
    }
    assert boxes.init_args[1] == "our-key"
    config = boxes._deployment_config
    assert config.request_router_config.request_router_kwargs == {
        "router_key": "our-key",
        "path": "/",
        "weight": 2.5,
    }
    assert routers.init_args[0] == "our-key" and routers.init_args[2] == []
    # The running requests get the drain time and more before Ray kills the box.
    assert config.graceful_shutdown_timeout_s == 35


@pytest.fixture
def two_kinds(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "box.yaml").write_text(BOX, encoding="utf-8")
    (tmp_path / "search.yaml").write_text(SEARCH, encoding="utf-8")
    box = {"config": str(tmp_path / "box.yaml"), "boxes": 2, "autoscale": {"max_boxes": 5, "start_s": 90}}
    search = {"config": str(tmp_path / "search.yaml"), "boxes": 4, "gpus": 0, "cpus": 2}
    return {"kinds": {"chat": box, "search": search}, "routers": 3}


def test_only_what_needs_a_restart_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.setenv(ROUTER_KEY, "our-key")
    file = tmp_path / "box.yaml"

    def built(content: str, boxes: int = 2) -> tuple[str, str, object]:
        file.write_text(content, encoding="utf-8")
        made = fleet({"kinds": {"box": {"config": str(file), "boxes": boxes}}})
        box, router = made._bound_deployment, made._ingress_request_router._bound_deployment
        return box.version, router.version, box._deployment_config.user_config

    before = built(BOX)
    assert built(BOX, boxes=3) == before
    version, router, content = built(BOX + "classes: {quick: {default: true}}\n")
    assert (version, router) == before[:2]
    assert content == {**before[2], "classes": {"quick": {"default": True}}}
    assert built(BOX + "pool: {margin: 0.2}\n")[0] != version


def test_the_page_is_an_application_with_the_routers_key(
    two_kinds: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.fleet_on_ray.application import ROUTER_KEY, page

    monkeypatch.delenv(ROUTER_KEY, raising=False)
    with pytest.raises(ConfigError, match="TANDEM_ROUTER_KEY is not set; the page needs the key"):
        page(two_kinds)
    monkeypatch.setenv(ROUTER_KEY, "our-key")
    key, kinds, server = page(two_kinds)._bound_deployment.init_args
    assert (key, kinds) == ("our-key", {"": "chat", "/-tandem/search": "search"})
    # The keys are those of the first kind.
    assert server.drain_ms == 5_000


def test_each_kind_is_an_application_whose_routers_know_all(
    two_kinds: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.setenv(ROUTER_KEY, "our-key")
    built = fleet({**two_kinds, "kind": "search"})
    boxes, routers = built._bound_deployment, built._ingress_request_router._bound_deployment
    assert (boxes.num_replicas, routers.num_replicas) == (4, 1)
    assert (boxes.ray_actor_options["num_cpus"], boxes.ray_actor_options["num_gpus"]) == (2, 0)
    assert routers.init_args[2] == ["chat"]
    kwargs = boxes._deployment_config.request_router_config.request_router_kwargs
    assert kwargs["path"] == "/-tandem/search"
    first = fleet(two_kinds)._ingress_request_router._bound_deployment
    assert first.num_replicas == 3 and first.init_args[2] == ["search"]


def test_kinds_have_one_key_and_known_names(
    two_kinds: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.delenv(ROUTER_KEY, raising=False)
    with pytest.raises(ConfigError, match="TANDEM_ROUTER_KEY is not set; applications of several kinds need"):
        fleet(two_kinds)
    monkeypatch.setenv(ROUTER_KEY, "our-key")
    with pytest.raises(ConfigError, match="kind='none': is not in kinds; choose one of chat, search"):
        fleet({**two_kinds, "kind": "none"})


def test_a_scaled_kind_has_the_rule_as_its_policy(
    two_kinds: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private.autoscaling_state import _resolve_policy_callable

    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.setenv(ROUTER_KEY, "our-key")
    config = fleet(two_kinds)._bound_deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    policy = _resolve_policy_callable(config.policy)
    context = SimpleNamespace(
        aggregated_metrics={"use": {"a": 0.9, "b": 0.8, "gone": 5.0}},
        running_replicas=["a", "b"],
        current_num_replicas=2,
        target_num_replicas=2,
    )
    # 1.7 boxes' work at 0.7.
    assert policy(context) == (3, {})
    context.aggregated_metrics = None
    assert policy(context) == (2, {})


def test_a_change_of_a_scaled_kind_keeps_the_number_of_its_boxes(
    two_kinds: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
    from ray.serve._private.common import DeploymentID

    from controlplane.fleet_on_ray.application import ROUTER_KEY, fleet

    monkeypatch.setenv(ROUTER_KEY, "our-key")
    deployed = SimpleNamespace(
        deployment_config=fleet(two_kinds)._bound_deployment._deployment_config,
        target_capacity=None,
        target_capacity_direction=None,
        config_changed=lambda other: True,
    )
    state = DeploymentAutoscalingState(DeploymentID("Box", "tandem-chat"))
    assert [state.register(deployed, boxes) for boxes in (0, 4)] == [2, 4]
