"""Take the picture of a report that docs/how-to/report.md shows: the first screen of a real one, 1280 pixels wide.

python docs/site/screenshots.py

It needs Chromium or Chrome, compares three methods over five seeds (about a minute) and writes docs/images/report.png.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from fedlowrank.cli.main import main as fedlowrank

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1280, 720
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLORS = 128
"""Enough for letters and lines, and a third of the size of a picture in full color."""


def find_browser() -> str:
    """Find the command of Chromium or Chrome; end with what to install if there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        sys.exit(
            f"docs/site/screenshots.py needs a browser, and none of {', '.join(BROWSERS)} is on the PATH. "
            "Install one, such as by: apt install chromium"
        )
    return found


def take_screenshot(browser: str, page: Path, target: Path) -> None:
    """Show a page without a window and write its first screen as PNG.

    Args:
        browser: command of Chromium or Chrome.
        page: HTML file.
        target: PNG file to write.
    """
    with tempfile.TemporaryDirectory() as profile:
        # no sandbox: it cannot be had in containers, and the page is our own
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        size, place = f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}"
        command = [browser, *options, f"--user-data-dir={profile}", size, place, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(COLORS).save(target, optimize=True)


def main() -> None:
    """Compare methods, write their report and take its picture."""
    browser = find_browser()
    with tempfile.TemporaryDirectory() as folder:
        experiment = ROOT / "experiments" / "demo" / "first.toml"
        if fedlowrank(["compare", str(experiment), "--seeds", "0,1,2,3,4", "-o", folder]):
            sys.exit("the comparison failed, so there is no report to take a picture of")
        take_screenshot(browser, Path(folder) / "report.html", TARGET)
    print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
