"""The dashboard's files over HTTP: sizes, headers, links, and nothing but the listed files."""

import gzip
import re

import pytest

from controlplane.api.operations.dashboard import FLEET_MEDIA_TYPES, FOLDER, LINKS, MEDIA_TYPES
from tests.controlplane.api.operations.test_admin import SETTINGS
from tests.controlplane.api.scripted_server import Stage, staged

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
async def stage():
    async with staged(SETTINGS) as one:
        yield one


def test_all_files_take_at_most_60_kb_compressed():
    shipped = {file.name for file in FOLDER.iterdir()}
    assert shipped == {*MEDIA_TYPES, *FLEET_MEDIA_TYPES, "uPlot.LICENSE.txt"}
    sizes = {name: len(gzip.compress((FOLDER / name).read_bytes(), 9)) for name in MEDIA_TYPES}
    assert sum(sizes.values()) < 60_000, sizes


def test_the_files_refer_only_to_each_other_and_run_no_inline_code():
    for name in MEDIA_TYPES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        if name.startswith("uPlot"):
            continue
        for found in re.findall(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)";""", text):
            target = found[0] or found[1]
            assert target.removeprefix("dashboard/") in {*MEDIA_TYPES, *LINKS.values(), "", "data:,"}, target
        assert re.search(r"https?:|innerHTML|<style|\sstyle=|\son\w+=", text) is None, name


async def test_root_has_links_for_people_and_for_programs(stage: Stage):
    found = await stage.http.get("/")
    assert found.json()["links"] == LINKS
    for link in LINKS.values():
        assert (await stage.http.get(f"/{link}")).status_code == 200
    page = await stage.http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert set(re.findall(r'<li><a href="([^"]+)"', page.text)) < {*LINKS.values()}


@pytest.mark.parametrize("name", ["", *MEDIA_TYPES])
async def test_a_file_has_strict_headers_and_an_entity_tag(stage: Stage, name: str):
    found = await stage.http.get(f"/dashboard/{name}")
    assert found.status_code == 200
    assert found.headers["content-encoding"] == "gzip"
    assert found.text == (FOLDER / (name or "index.html")).read_text(encoding="utf-8")
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert found.headers["x-content-type-options"] == "nosniff"
    tag = {"if-none-match": found.headers["etag"]}
    assert (await stage.http.get(f"/dashboard/{name}", headers=tag)).status_code == 304
    plain = await stage.http.get(f"/dashboard/{name}", headers={"accept-encoding": "identity"})
    assert plain.content == found.content and "content-encoding" not in plain.headers


async def test_the_address_without_a_slash_leads_to_the_page_under_any_prefix(stage: Stage):
    found = await stage.http.get("/dashboard")
    assert (found.status_code, found.headers["location"]) == (307, "dashboard/")


@pytest.mark.parametrize("name", ["missing.js", "uPlot.LICENSE.txt", "..%2fapp.py", "%2e%2e/app.py"])
async def test_nothing_else_is_served(stage: Stage, name: str):
    assert (await stage.http.get(f"/dashboard/{name}")).status_code == 404
