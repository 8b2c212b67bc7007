"""Pages of files that lie outside of `docs/`: the changelog, how to contribute, and the list of experiment files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_pages() -> dict[str, str]:
    """The pages by path, with links that fit the site."""
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    experiments = (ROOT / "experiments" / "README.md").read_text().replace("](../docs/", "](")
    return {
        "changelog.md": changelog,
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "]("),
        "experiments.md": re.sub(r"^# .*", "# Experiment files", experiments, count=1),
    }
