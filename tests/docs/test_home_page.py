"""The home page is the README with links that fit the site, and each page links to the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.site_scripts import DOCS, ROOT, SITE, load_site_script

TARGET = re.compile(r"\]\((?!\w+:|#)([^)#]+)")


@pytest.fixture(scope="module")
def pages():
    return load_site_script("root_pages")


def test_the_readme_is_the_home_page_and_has_no_second_copy(pages) -> None:
    made = pages.make_pages()
    assert not (DOCS / "index.md").exists()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        source, page = (ROOT / name).read_text(), made[pages.PAGES[name]]
        # links and the theme's settings apart, no letter differs
        page = re.sub(r"\A---\n.*?\n---\n\n", "", page, flags=re.DOTALL)
        assert TARGET.sub("](", page) == TARGET.sub("](", source)
        assert len(TARGET.findall(page)) == len(TARGET.findall(source)) > 0
        for old, new in zip(TARGET.findall(source), TARGET.findall(page), strict=True):
            assert new in made or (DOCS / new).is_file(), f"{name} links to {old}"
    # beside the pages, files of the repository as they are
    for path in made.keys() - pages.PAGES.values():
        assert made[path] == (ROOT / path).read_bytes()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](docs/x.md#b) ![c](docs/images/d.svg \"e\")", "[a](<docs/x.md>#b) ![c](<docs/images/d.svg> \"e\")"),
        ("[`a`](x.md), [b][1]\n\n[1]: y.md", "[`a`](<x.md>), [b][1]\n\n[1]: <y.md>"),
        ("<a href=\"x.md\"><img src='docs/y.png'></a>", "<a href=\"<x.md>\"><img src='<docs/y.png>'></a>"),
        ("[a](https://x.org/docs/y.md) [b](#c) [d](mailto:e@f.gh)", None),
        ("`f[0](x)` and ``[a](`x`)``", None),
        ("```python\nf[0](x)\n```\n~~~\n[a](b.md)\n~~~", None),
        ("```sh\na\n```\n[b](c.md)\n```sh\n[d](e.md)\n```", "```sh\na\n```\n[b](<c.md>)\n```sh\n[d](e.md)\n```"),
    ],
)  # fmt: skip
def test_links_are_replaced_and_code_is_not(pages, text: str, found: str | None) -> None:
    assert pages.replace_targets(text, lambda target: f"<{target}>") == (found or text)


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("../README.md", "index.md"),
        ("../docs/how-to/data.md", "how-to/data.md"),
        ("../docs/notebooks/own-model.ipynb", "notebooks/own-model.md"),
        (".", "experiments.md"),
        ("demo/first.toml", "experiments/demo/first.toml"),
        ("../docs/site/build.py", "docs/site/build.py"),
    ],
)
def test_where_a_linked_file_lies_in_the_site(
    pages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, place: str
) -> None:
    for name in (
        "docs/site/build.py",
        "experiments/demo/first.toml",
        "docs/how-to/data.md",
        "docs/notebooks/own-model.ipynb",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "README.md").touch()
    (tmp_path / "experiments" / "README.md").write_text(f"[a]({target})")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    made = pages.convert("experiments/README.md")
    assert made.pop("experiments.md") == f"[a]({place})"
    # scripts and settings are no pages, so they are copied
    assert made == ({place: place.encode()} if place.endswith((".py", ".toml")) else {})


@pytest.mark.parametrize("target", ["nothing.md", "demo", "../../outside.md"])
def test_a_link_to_nothing_stops_the_build(pages, target: str) -> None:
    with pytest.raises(ValueError, match=rf"experiments/README.md links to {target}, which is no file"):
        pages.find_target("experiments/README.md", target)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://host.org/owner/name.git", "https://host.org/owner/name"),
        ("https://user:secret@host.org:8443/owner/name/", "https://host.org:8443/owner/name"),
        ("git@host.org:owner/name.git", "https://host.org/owner/name"),
        ("ssh://git@host.org:2222/owner/name.git", "https://host.org/owner/name"),
        ("/home/someone/name", None),
        ("../name.git", None),
        ("file:///home/someone/name", None),
        ("C:\\name", None),
        ("", None),
    ],
)
def test_the_address_of_the_repository(remote: str, address: str | None) -> None:
    assert load_site_script("repository_link").web_address(remote) == address


def test_an_address_in_the_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_site_script("repository_link")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def link(urls: str) -> tuple[str | None, str]:
        (tmp_path / "pyproject.toml").write_text(f"[project.urls]\n{urls}")
        made = module.on_config(SimpleNamespace(site_name="fedlowrank", repo_url=None, repo_name=None))
        return made.repo_url, made.repo_name

    assert link('Paper = "https://arxiv.org"') == (None, "fedlowrank")
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", "git@host.org:a/b.git"], check=True)
    assert link("") == ("https://host.org/a/b", "fedlowrank")
    # a folder of another repository is no clone of this one
    monkeypatch.setattr(module, "ROOT", tmp_path / "within")
    (tmp_path / "within").mkdir()
    assert module.remote_of_clone() == ""
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert link('Repository = "https://x.org/y"') == ("https://x.org/y", "fedlowrank")


def test_the_link_asks_no_host_while_a_page_is_read() -> None:
    """The theme's script fetches stars and releases for every element of the component `source`."""
    assert "data-md-component" not in (SITE / "theme" / "partials" / "source.html").read_text()


@pytest.mark.full
def test_the_reference_lists_names_that_exist() -> None:
    calls = [
        (node.args[0].value, node.args[1].value.split())
        for node in ast.walk(ast.parse((SITE / "reference.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_names"
    ]
    assert len(calls) > 40
    for module, names in calls:
        path = ROOT / "src" / "fedlowrank" / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text()
        for name in names:
            defined = rf"^(?:class|def) {name}\b|^{name}\b.*=|^type {name}\b|^from \..*\b{name}\b"
            assert re.search(defined, text, re.MULTILINE), f"docs/site/reference.py lists {module}.{name}"
