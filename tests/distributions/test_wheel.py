"""The wheel that users install: its metadata, and that it works without the repository beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
name = "first"
compare = ["standalone", "fedavg"]
data = { source = "iris" }
partition = { kind = "iid", clients = 3 }
model = { names = ["mlp"], hidden = [8] }
run = { rounds = 2 }
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_twine_accepts_both_distributions(distributions: Path) -> None:
    files = sorted(distributions.iterdir())
    assert [re.sub(r"-\d.*?\d(?=[-.][a-z])", "", path.name) for path in files] == [
        "fedlowrank-py3-none-any.whl",
        "fedlowrank.tar.gz",
    ]
    said = run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    assert said.count("PASSED") == len(files)


@pytest.mark.full
def test_the_wheel_holds_the_package_alone_with_its_data_files(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = Parser().parsestr(
            wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        )
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"fedlowrank"}
    source = ROOT / "src"
    files = (p for p in (source / "fedlowrank").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert {p.relative_to(source).as_posix() for p in files} <= set(names)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)


@pytest.mark.full
def test_the_installed_wheel_makes_a_comparison_and_its_report(distributions: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", str(next(distributions.glob("*.whl"))))
    # dependencies come from the present environment, whose editable install a PYTHONPATH does not show
    env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"], "OMP_NUM_THREADS": "1"}
    where = run(str(python), "-c", "import fedlowrank; print(fedlowrank.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(tmp_path)
    (tmp_path / "first.toml").write_text(EXPERIMENT)
    said = run(str(python.with_name("fedlowrank")), "compare", "first.toml", cwd=tmp_path, env=env)
    assert "Standalone" in said
    assert "<html" in (tmp_path / "runs" / "first" / "report.html").read_text()
