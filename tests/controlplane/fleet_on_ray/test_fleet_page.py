"""What docs/fleet.md says of fleets on Ray Serve."""

import re
from dataclasses import fields
from pathlib import Path

import yaml

from controlplane.config.fleet_file import AutoscaleSection, BoxKind, FleetFile
from controlplane.fleet_on_ray.kind_names import PAGE_APPLICATION, PAGE_PATH, application_name, route_prefix
from controlplane.fleet_on_ray.local_cluster import BINARY, SETTINGS

PAGE = Path("docs/fleet.md").read_text(encoding="utf-8")


def test_the_page_has_the_environment_of_a_node() -> None:
    stated = dict(re.findall(r"^export (\w+)=(\S+)", PAGE, re.MULTILINE))
    assert {name: stated.get(name) for name in SETTINGS} == dict(SETTINGS)
    assert set(stated) == {*SETTINGS, BINARY, "TANDEM_ROUTER_KEY"}


def test_the_page_has_every_key_of_a_fleet_file() -> None:
    example = re.search(r"```yaml\n# my-fleet.yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    assert set(yaml.safe_load(example[1])) == {key.name for key in fields(FleetFile)}
    table = PAGE.partition("| key of a kind |")[2].partition("\n\n")[0]
    stated = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1:2][0])}
    assert stated == {key.name for each in (BoxKind, AutoscaleSection) for key in fields(each)}


def test_the_page_deploys_each_kind_under_the_names_that_haproxy_expects() -> None:
    deployed = re.search(r"```yaml\n(http_options:.*?)```", PAGE, re.DOTALL)
    assert deployed is not None
    *applications, page = yaml.safe_load(deployed[1])["applications"]
    assert (page["name"], page["route_prefix"]) == (PAGE_APPLICATION, PAGE_PATH)
    assert page["args"] == {key: value for key, value in applications[0]["args"].items() if key != "kind"}
    kinds = list(applications[0]["args"]["kinds"])
    assert [(each["name"], each["route_prefix"]) for each in applications] == [
        (application_name(kind), route_prefix(kind, is_first=kind == kinds[0])) for kind in kinds
    ]
    assert [each["args"].get("kind", kinds[0]) for each in applications] == kinds
