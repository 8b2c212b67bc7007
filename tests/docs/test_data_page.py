"""The page on data: its Python code, tables and experiment files work as shown."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.data.download.downloads import DOWNLOADS
from fedlowrank.data.sources import SOURCES
from fedlowrank.data.text.text_sources import TEXT_SOURCES

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    actual: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return actual


def experiment(source: str) -> dict[str, object]:
    (text,) = [text for text in blocks("toml") if f'source = "{source}"' in text]
    return tomllib.loads(text)


@pytest.mark.full
def test_the_python_code_and_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for text in blocks("python"):
        exec(compile(text, "data.md", "exec"), scope)
    accuracy, sizes = capsys.readouterr().out.splitlines()
    assert 0 <= float(accuracy) <= 1
    assert sizes == "[1, 1]"
    federation = ExperimentConfig.parse(experiment("arrays")).federation()
    assert [len(c.train) + len(c.val) + len(c.test) for c in federation.clients] == [20, 20]


@pytest.mark.full
def test_the_own_partition_and_the_extended_dirichlet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (code,) = blocks('python title="shifts.py"')
    Path("shifts.py").write_text(code)
    shown = [text for text in blocks("toml") if "shifts:" in text or "extended_dirichlet" in text]
    digits = {"method": "fedavg", "data": {"source": "digits"}, "model": {"names": ["mlp"]}}
    own, extended = (ExperimentConfig.parse({**digits, **tomllib.loads(text)}).federation() for text in shown)
    assert len(own.clients) == len(extended.clients) == 20
    actual = [
        [len({*c.train.y.tolist(), *c.val.y.tolist(), *c.test.y.tolist()}) for c in f.clients]
        for f in (own, extended)
    ]
    # sorted by class, all clients but those at the nine borders have one
    assert actual[0].count(1) >= 20 - 9
    assert max(actual[1]) <= 2


@pytest.mark.full
def test_the_table_runs_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (table,) = blocks("csv")
    Path("patients.csv").write_text(table)
    (file,) = [text for text in blocks("toml") if "patients.csv" in text]
    Path("patients.toml").write_text(file)
    commands = [line.split()[1:] for line in blocks("sh")[0].splitlines()]
    assert [words[0] for words in commands] == ["data", "run"]
    for words in commands:
        assert main(words) == 0, capsys.readouterr().err
    assert "healthy" in capsys.readouterr().out


def test_the_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(12):
        file = Path("pictures", "ab"[i % 2], f"{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * i, 0, 0)).save(file)
    federation = ExperimentConfig.parse(experiment("folder")).federation()
    assert federation.clients[0].train.x.shape[1:] == (3, 8, 8)


@pytest.mark.parametrize("source", ["huggingface", "femnist", "shakespeare"])
def test_the_other_files_are_valid(source: str) -> None:
    assert type(ExperimentConfig.parse(experiment(source)).data.source) is SOURCES[source]


def test_the_texts_are_valid() -> None:
    # the section [language] would import transformers
    data = experiment("instructions")["data"]
    assert isinstance(data, dict)
    assert TEXT_SOURCES[data.pop("source")](**data).client == "author"


def test_every_download_has_its_row() -> None:
    rows = [
        re.findall(r"`(\w+)`", line.split("|")[1]) for line in PAGE.splitlines() if line.startswith("| `")
    ]
    assert {name for row in rows for name in row} >= set(DOWNLOADS)
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        for name in re.findall(r"`(\w+)`", cells[1]) if line.startswith("| `") else ():
            if name in DOWNLOADS:
                kinds = {file.checksum.partition(":")[0] for file in DOWNLOADS[name].files}
                assert kinds == {{"MD5": "md5", "SHA-256": "sha256", "none published": ""}[cells[3]]}
                assert f'"{tomllib.loads(DOWNLOADS[name].settings)["source"]}"' in cells[4]
