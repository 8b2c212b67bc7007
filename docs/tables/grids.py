"""Run the demo of ``fedlowrank tune`` and paste its table into ``docs/how-to/grids.md``: ``python docs/tables/grids.py``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # docs/, as for its commands
from tables.experiments import paste
from tables.settings import ROOT

PAGE = ROOT / "docs" / "how-to" / "grids.md"
TABLE = Path("runs") / "demo-tune-tuned" / "tuning.md"

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    file = ROOT / "experiments" / "demo" / "tune.toml"
    subprocess.run(
        [sys.executable, "-m", "fedlowrank.cli.main", "tune", str(file), "--jobs", "2"], check=True
    )
    paste(PAGE, "tuning", TABLE.read_text().rstrip("\n"))
