"""`fedlowrank adapters --push`: what arrives at a stand-in for the Hugging Face Hub, and what is said without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml

from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.export.hub_upload import check_upload, upload_model
from tests.language.export.hub_stand_in import TOKEN, HubStandIn
from tests.language.peft_scores import score_with_peft
from tests.language.text_experiments import make_causal_tables, write_toml

IDS = {"input_ids": torch.arange(3, 19).reshape(2, 8)}


@pytest.fixture(scope="module")
def stored(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    tables = make_causal_tables(llama, folder, run={"rounds": 1}, export={"push": "me/from-file"})
    assert main(["run", str(write_toml(tables, folder / "e.toml")), "-o", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as made:
        yield made


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch, hub: HubStandIn) -> HubStandIn:
    """The stand-in, in place of the Hub for this process."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def push(run: Path, out: Path, hub: HubStandIn, *options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, for huggingface_hub reads its environment when it is imported."""
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(out.parent / "hf"), "HF_HUB_DISABLE_XET": "1"}
    own = {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-m", "fedlowrank", "adapters", str(run), "-o", str(out), *options]
    return subprocess.run(
        command, env={**os.environ, **home, **own}, capture_output=True, text=True, check=False, timeout=200
    )


def test_the_server_s_adapter_arrives_in_a_private_repository(
    stored: Path, llama: Path, hub: HubStandIn, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = push(stored, out, hub, "--push", "me/adapter", "--base-model", "me/base")
    assert done.returncode == 0, done.stderr
    assert f"{hub.endpoint}/me/adapter" in done.stdout
    assert hub.private == {"me/adapter"}
    # nothing of single clients
    assert set(hub.repositories) == {"me/adapter"}
    files = hub.repositories["me/adapter"]
    assert files == {p.name: p.read_bytes() for p in (out / "server").iterdir()}
    assert yaml.safe_load(files["README.md"].decode().split("---\n")[1])["base_model"] == "me/base"
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in files.items():
        (copy / name).write_bytes(content)
    assert torch.equal(score_with_peft(llama, copy, IDS), score_with_peft(llama, out / "server", IDS))


@pytest.mark.full
# huggingface_hub passes a file to its HTTP client by an older argument
@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
def test_the_file_names_the_repository_and_with_merged_the_whole_model_is_uploaded(
    stored: Path, logged_in: HubStandIn, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["adapters", str(stored), "-o", str(out), "--base-model", "me/base", "--merged"]
    assert main([*command, "--push"]) == 0
    files = logged_in.repositories["me/from-file"]
    assert files == {p.name: p.read_bytes() for p in (out / "server_merged").iterdir()}
    # a second time, to a repository that exists
    assert main([*command, "--push", "--force"]) == 0


def test_a_public_repository_gets_nothing(logged_in: HubStandIn, tmp_path: Path) -> None:
    logged_in.repositories["me/public"] = {}
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match="me/public is a public repository, so the upload would publish"):
        upload_model(tmp_path, "me/public", "a")
    assert logged_in.repositories["me/public"] == {}


def test_nothing_is_uploaded_without_being_asked(stored: Path, logged_in: HubStandIn, tmp_path: Path) -> None:
    assert main(["adapters", str(stored), "-o", str(tmp_path / "out"), "--base-model", "me/base"]) == 0
    assert logged_in.requests == []


def test_a_base_that_nobody_else_has_is_refused(
    stored: Path, logged_in: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", str(stored), "-o", str(tmp_path / "out"), "--push", "me/adapter"]) == 1
    assert "--base-model OWNER/NAME" in capsys.readouterr().err
    assert logged_in.requests == []
    assert not (tmp_path / "out").exists()


def test_who_is_not_logged_in_is_told_how(logged_in: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(DataError, match="hf auth login"):
        check_upload("me/adapter")


def test_a_token_that_may_not_write_is_said(
    logged_in: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="The token may not write there"):
        upload_model(tmp_path, "me/adapter", "a")


def test_metadata_that_the_hub_refuses_are_said(logged_in: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nbase_model: /a/b\n---\n")
    with pytest.raises(DataError, match=r"(?s)is not valid.*The Hub refused it"):
        upload_model(tmp_path, "me/adapter", "a")


def test_a_hub_that_cannot_be_reached_is_said(
    logged_in: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9.*Check the connection"):
        upload_model(tmp_path, "me/adapter", "a")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        upload_model(tmp_path, "me/adapter", "a")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="needs huggingface_hub: pip install"):
        check_upload("me/adapter")


def test_a_repository_has_an_owner() -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_upload("adapter")
