"""The package, the workflows and the pages name the same versions of Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLASSIFIED = [
    found[1]
    for line in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]


def versions_of(workflow: str) -> list[list[str]]:
    """The versions of Python of each job of a workflow that sets up Python."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"].values()
    actual = []
    for job in jobs:
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/setup-python"):
                version = step["with"]["python-version"]
                matrix = job.get("strategy", {}).get("matrix", {}).get("python")
                actual.append(matrix if version == "${{ matrix.python }}" else [version])
    return actual


def test_the_tests_run_with_each_version_that_the_package_names() -> None:
    assert CLASSIFIED
    tests, *others = versions_of("ci.yml")
    assert tests == CLASSIFIED
    assert versions_of("nightly.yml") == [CLASSIFIED]
    assert all(job == CLASSIFIED[:1] for job in others + versions_of("release.yml"))


def test_the_oldest_version_is_the_same_everywhere() -> None:
    oldest = CLASSIFIED[0]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md", "docs/installation.md", "docs/get-started.md"):
        named = re.findall(r"Python (3\.\d+) or newer", (ROOT / page).read_text())
        assert set(named) <= {oldest}, page
    assert re.search(
        rf"^FROM python:{oldest}-", (ROOT / "examples/deploy/Dockerfile").read_text(), re.MULTILINE
    )


def test_the_pages_name_the_versions_that_were_run() -> None:
    text = (ROOT / "docs" / "installation.md").read_text()
    said = re.search(r"The tests ran with Python ((?:3\.\d+(?:, | and )?)+)", text)
    assert said is not None
    assert re.findall(r"3\.\d+", said[1]) == CLASSIFIED
