"""The site builds strictly, links to nothing that is missing, and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from fedlowrank.methods import METHODS, FedSLR
from tests.docs.site_scripts import DOCS, ROOT, load_site_script

REPOSITORY = "https://host.org/owner/fedlowrank"


class Page(HTMLParser):
    """Links, anchors and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    # as of a clone from there, whatever this one is of
    origin = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "remote.origin.url",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }
    actual = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT, env=os.environ | quiet | origin, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert actual.returncode == 0, actual.stderr
    return folder


@pytest.mark.full
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    for path, page in pages.items():
        assert [src for src in page.loaded if urlsplit(src).netloc] == [], path
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)} links to {link}"
            if target in pages and parts.fragment:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {link}"


@pytest.mark.full
def test_stars_in_numbers_and_names_are_no_emphasis(site: Path) -> None:
    """``0.3*`` marks the edge of a grid, and π* is a name; Markdown takes two such stars for an emphasis."""
    for path in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert re.findall(r".{30}[\w.]<em>[ ,.;:)‖].{30}", text) == [], path.relative_to(site)


@pytest.mark.full
def test_every_page_has_a_search_box_and_a_link_to_the_repository(site: Path) -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if "Repository" not in urls and not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    for path in site.rglob("*.html"):
        assert urls.get("Repository", REPOSITORY) in Page(path).links, path
        text = path.read_text()
        assert 'data-md-component="search-query"' in text
        # of this the theme's script asks the host for stars
        assert 'data-md-component="source"' not in text


@pytest.mark.full
def test_methods_names_and_notebooks_have_pages(site: Path) -> None:
    import fedlowrank

    assert {path.stem for path in (site / "methods").glob("*.html")} == {*METHODS, "index"}
    anchors = set().union(*(Page(path).anchors for path in (site / "reference").glob("*.html")))
    # constants have no page
    for name in set(fedlowrank.__all__) - {"METHODS", "NO_UPDATE", "ZERO_REFERENCE"}:
        value = getattr(fedlowrank, name)
        assert f"{value.__module__}.{value.__qualname__}" in anchors
    for notebook in (DOCS / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / f"{notebook.stem}.html").is_file()
    actual = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any(
        d["location"].startswith("reference/run.html") and "participation" in d["text"] for d in actual
    )


@pytest.mark.full
@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_stored_outputs_are_those_of_now(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    load_site_script("notebook_pages").execute(copy)

    def outputs(file: Path) -> list[list[str]]:
        cells = json.loads(file.read_text())["cells"]
        return [[output["output_type"] for output in cell.get("outputs", [])] for cell in cells]

    assert outputs(copy) == outputs(path)
    assert sum(map(len, outputs(path))) >= 3


@pytest.mark.full
def test_a_page_of_a_method_has_what_the_package_and_the_results_say() -> None:
    pages = load_site_script("method_pages")
    text = pages.method_page("fedslr", FedSLR, pages.read_notes()["fedslr"])
    assert "| `lam` | `float` |" in text
    assert ">= 0" in text
    # of docs/results/fedslr.md
    assert "58.3 ± 4.9" in text
    # the body's first layer of the trial
    assert "| from the client | `body.0.weight` | 4 × 6 | 24 |" in text
    assert "FedSLR: fusion of global and local knowledge" in text


def test_the_reference_lists_names_that_exist_and_are_documented() -> None:
    reference = load_site_script("reference")
    reference.check_docstrings(name for *_, names in reference.ROOMS for name in names)


def test_what_stops_the_build() -> None:
    with pytest.raises(ValueError, match=r"\[forgotten\] needs kind, short, use"):
        load_site_script("method_pages").read_notes({"forgotten": FedSLR})
    reference = load_site_script("reference")
    module = ModuleType("test_undocumented")
    exec('class Bad:\n    """Said."""\n    def undocumented(self): ...\n', vars(module))
    sys.modules["test_undocumented"] = module
    with pytest.raises(ValueError, match=r"without a docstring: test_undocumented.Bad.undocumented"):
        reference.check_docstrings(["test_undocumented.Bad"])
    with pytest.raises(ValueError, match="does not exist"):
        reference.check_docstrings(["fedlowrank.core.key.Keyy"])


def test_a_notebook_with_a_failed_cell_is_no_page(tmp_path: Path) -> None:
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": []}
    cell = {"cell_type": "code", "source": ["1"], "outputs": [error]}
    (tmp_path / "broken.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match=r"broken.ipynb has a cell that failed: KeyError"):
        load_site_script("notebook_pages").convert(tmp_path / "broken.ipynb")
