"""Pages of files that lie outside of `docs/`: the README as home page, the changelog, how to contribute, experiment files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
}
"""The page in the site's root of each file of the repository."""

_CODE = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,}).*?^ {0,3}(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(
    # `[text](target)`, `[text]: target` and `<a href="target">`, each with what stands before the target
    r"(?P<before>\]\(<?|^ {0,3}\[[^\]\n]+\]:[ \t]+<?|\b(?:href|src|srcset)=[\"'])"
    r"(?![a-z][a-z0-9+.-]*:|[#/])(?P<target>[^)>#\s\"']+)",
    re.MULTILINE,
)


def make_pages() -> dict[str, str | bytes]:
    """The pages by path, with links that fit the site, and the files outside of `docs/` that they link to."""
    made: dict[str, str | bytes] = {}
    for name in PAGES:
        made |= convert(name)
    experiments = str(made["experiments.md"])
    return made | {
        # no side bar of pages, which would list this page alone: its room is for code
        "index.md": f"---\nhide: [navigation]\n---\n\n{made['index.md']}",
        "experiments.md": re.sub(r"^# .*", "# Experiment files", experiments, count=1),
    }


def convert(name: str) -> dict[str, str | bytes]:
    """Make the page of a file of the repository, and copy the files outside of `docs/` that it links to.

    Raises:
        ValueError: of a relative link to something that is not in the repository, or to a folder without a page.
    """
    copied: dict[str, str | bytes] = {}

    def place(target: str) -> str:
        path = find_target(name, target)
        if path in PAGES:
            return PAGES[path]
        suffix = posixpath.splitext(path)[1]
        # the site has no scripts and settings of docs/ (exclude_docs)
        if path.startswith("docs/") and suffix not in (".py", ".toml"):
            return path.removeprefix("docs/").removesuffix(".ipynb") + (".md" if suffix == ".ipynb" else "")
        copied[path] = (ROOT / path).read_bytes()
        return path

    return {PAGES[name]: replace_targets((ROOT / name).read_text(), place), **copied}


def find_target(name: str, target: str) -> str:
    """Find the path in the repository of a relative link in the file `name`; a folder stands for its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if f"{path}/README.md" in PAGES:
        return f"{path}/README.md"
    if path.startswith("../") or not (ROOT / path).is_file():
        raise ValueError(
            f"{name} links to {target}, which is no file of the repository; link to a file or a full address"
        )
    return path


def replace_targets(text: str, place: Callable[[str], str]) -> str:
    """Replace the targets of relative links of a Markdown text, also in HTML. Code and anchors stay.

    Args:
        text: Markdown.
        place: the new target of one.
    """
    parts, end = [], 0
    for code in [*_CODE.finditer(text), None]:
        prose = text[end : code.start() if code else len(text)]
        parts.append(_LINK.sub(lambda link: link["before"] + place(link["target"]), prose))
        if code:
            parts.append(code[0])
            end = code.end()
    return "".join(parts)
