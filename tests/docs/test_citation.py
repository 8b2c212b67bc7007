"""The citation file: the four papers of the package, and no date of a release before there is one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from fedlowrank.core.version import __version__

ROOT = Path(__file__).resolve().parents[2]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_four_papers_are_cited_with_all_authors() -> None:
    links = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    numbers = {f"arXiv:{link.rpartition('/')[2]}" for link in links.values()}
    papers = {paper["identifiers"][0]["value"]: paper for paper in CITATION["references"]}
    assert papers.keys() == numbers
    # the head of a method's file has the authors as the paper gives them
    for name, number in (("fedslr", "arXiv:2302.11051"), ("floral", "arXiv:2410.03497")):
        head = (ROOT / "src" / "fedlowrank" / "methods" / f"{name}.py").read_text().split("arXiv:")[0]
        names = [author["family-names"] for author in papers[number]["authors"]]
        assert re.findall("|".join(names), head) == names
    first = {number: paper["authors"][0]["family-names"] for number, paper in papers.items()}
    assert (first["arXiv:2505.18494"], first["arXiv:2310.13283"]) == ("Peng", "Yi")


def test_a_release_has_a_date_and_what_is_not_released_has_none() -> None:
    assert CITATION["version"] == __version__
    (state,) = re.findall(
        rf"^## \[{re.escape(__version__)}\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert str(CITATION.get("date-released", "unreleased")) == state


def test_the_file_has_the_keys_of_its_format() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= CITATION.keys()
    for paper in CITATION["references"]:
        assert paper.keys() - {"journal"} == {"type", "title", "authors", "year", "identifiers"}
        assert all(author.keys() == {"family-names", "given-names"} for author in paper["authors"])
