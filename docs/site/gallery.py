"""Draw the pictures of `docs/gallery.md` from small runs on handwritten digits: `python docs/site/gallery.py`, a few minutes.

The runs stay in `runs/gallery`; a second call goes on with them. The pictures are those of `fedlowrank report --figures`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from fedlowrank.cli.main import main

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "images" / "gallery"
DEMO = ROOT / "experiments" / "demo"
MAX_BYTES = 60_000

# Experiment, further words of `fedlowrank compare`, and the pictures that are shown.
RUNS = {
    "heterogeneous": (
        DEMO / "heterogeneous.toml",
        ["--methods", "pfedlora,standalone,fml,fedkd,lg_fedavg,fd,fedproto"],
        [
            "accuracy-over-rounds",
            "spread-over-clients",
            "accuracy-over-communication",
            "classes-at-each-client",
            "representations-pfedlora",
        ],
    ),
    "clusters": (
        DEMO / "clusters.toml",
        ["--methods", "fedavg,ifca,ensemble,floral"],
        ["routes-floral", "cluster-recovery-over-rounds"],
    ),
    "ranks": (
        DEMO / "homogeneous.toml",
        [
            "--methods",
            "fedavg,fedslr",
            'model.names=["mlp"]',
            "partition.classes_per_client=5",
            "run.rounds=40",
            "methods.fedslr.lam=0.01",
        ],
        ["rank-of-each-layer-over-rounds", "downlink-over-rounds"],
    ),
}


def draw(runs: Path) -> None:
    """Run the experiments and copy the chosen pictures.

    Raises:
        SystemExit: if a command fails or a picture is too large.
    """
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, (file, words, pictures) in RUNS.items():
        folder, figures = runs / name, runs / f"{name}-figures"
        commands = (
            ["compare", str(file), "-o", str(folder), *words],
            ["report", str(folder), "-o", str(runs / f"{name}.html"), "--figures", str(figures)],
        )
        for command in commands:
            if main(command) != 0:
                raise SystemExit(f"fedlowrank {' '.join(command)} failed")
        for picture in pictures:
            path = figures / f"{picture}.svg"
            if path.stat().st_size > MAX_BYTES:
                raise SystemExit(
                    f"{path} has {path.stat().st_size:,} bytes; the gallery allows {MAX_BYTES:,}"
                )
            shutil.copyfile(path, TARGET / f"{name}-{picture}.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="?", type=Path, default=ROOT / "runs" / "gallery", help="folder of the runs"
    )
    draw(parser.parse_args().runs)
