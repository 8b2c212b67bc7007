"""Run the demo of ``fedlowrank tune`` and paste its table into ``docs/how-to/grids.md``: ``python docs/tables/grids.py``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "grids.md"
TABLE = Path("runs") / "demo-tune-tuned" / "tuning.md"


def paste(page: str, table: str) -> str:
    """The page with the table between its marks."""
    begin, end = "<!-- begin tuning.md -->\n", "<!-- end tuning.md -->"
    return re.sub(f"({begin}).*({end})", lambda m: f"{m[1]}\n{table}\n{m[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    file = ROOT / "experiments" / "demo" / "tune.toml"
    subprocess.run(
        [sys.executable, "-m", "fedlowrank.cli.main", "tune", str(file), "--jobs", "2"], check=True
    )
    PAGE.write_text(paste(PAGE.read_text(), TABLE.read_text()))
