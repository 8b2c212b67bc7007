"""One federation of machines that hold the same base in different precision."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.key import Key
from fedlowrank.language import base_model, language_model
from fedlowrank.language.base_model import LanguageBase, LoadedBase
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.messages import Registration
from fedlowrank.network.server import NetworkError
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage
from tests.support.local_network import LocalTransport, intact, serve_run

HALF = {"dtype": "bfloat16", "micro_batch": 2}
TEXTS = ["the fox jumps over the dog", "the dog sleeps; the fox does not"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"), "causal", Key((0,)), TEXTS)


def experiment(base: Path, folder: Path, rounds: int = 2) -> ExperimentConfig:
    rows = [{"prompt": f"the {i % 5}", "response": f"the {['fox', 'dog'][i % 2]} sleeps"} for i in range(45)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ExperimentConfig.parse({
        "name": "mixed",
        "method": "fedhl",
        "language": {"path": str(base), "format": "plain", "context": 32},
        "data": {"source": "instructions", "path": str(folder / "rows.jsonl"), "prompt": "prompt",
                 "response": "response", "normalize": "none"},
        "partition": {"kind": "iid", "clients": 3},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "ranks": [4, 2, 1]},
        "run": {"rounds": rounds, "representations": 0},
        "defaults": {"batch_size": 8, "optimizer": {"kind": "adamw", "lr": 0.01}},
        # a machine that is left out ends the wait at once
        "network": {"min_clients": 3, "wait": 5.0, "limits": {"update_ratio": 0.0}},
    })  # fmt: skip


def clients(made: ExperimentConfig, folder: Path, *own: dict[str, Any]) -> LocalTransport:
    """A client for each table ``[local]``."""
    shares, folders = made.shares(), {}
    for i, local in enumerate(own):
        folders[100 + i] = folder / f"client-{i}"
        prepare(folders[100 + i], made.overlay({"local": local}), i, shares, SiteSettings.simulated())
    return LocalTransport(folders, intact)


def round_to_16_levels(weight: torch.Tensor, block: int = 32) -> torch.Tensor:
    """A weight with 16 equally spaced values in each block, as a 4-bit base has."""
    rows = weight.reshape(-1, block)
    step = rows.abs().amax(1, keepdim=True) / 7.5
    return ((rows / step - 0.5).round().clamp(-8, 7) + 0.5).mul(step).reshape(weight.shape)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Bases that were asked for in 4 bits, emulated, for bitsandbytes may be missing."""
    actual: list[Any] = []
    load = base_model.load_base

    def load_emulated(settings: LanguageBase, *rest: Any) -> LoadedBase:
        loaded = load(dataclasses.replace(settings, quantize=None), *rest)
        if settings.quantize == "4bit":
            with torch.no_grad():
                for parameter in loaded.model.parameters():
                    if parameter.ndim == 2:
                        parameter.copy_(round_to_16_levels(parameter))
            actual.append(loaded.model)
        return loaded

    monkeypatch.setattr(language_model, "load_base", load_emulated)
    return actual


def test_clients_of_three_precisions_train_one_model(
    base: Path, tmp_path: Path, quantized: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = experiment(base, tmp_path)
    carrier, uploads = clients(made, tmp_path, {}, HALF, {"quantize": "4bit"}), []

    def watched(carrier: LocalTransport, message: NodeMessage) -> list[Any]:
        actual = carrier.answered(message)
        if message.kind == "order" and actual.payload:
            uploads.append(tree.decode(actual.payload))
        return [actual]

    carrier.fault = watched
    runtimes = [ClientRuntime(folder) for folder in carrier.folders.values()]
    weights = [
        r.language.loaded.model.get_submodule("model.layers.0.self_attn.k_proj").weight for r in runtimes
    ]
    assert [w.dtype for w in weights] == [torch.float32, torch.bfloat16, torch.float32]
    assert [len(w.unique()) > 16 * w.numel() // 32 for w in weights] == [True, True, False]
    assert len({r.language.loaded.digest for r in runtimes}) == 1
    assert [r.engine.micro_batch for r in runtimes] == [None, 2, None]
    # what the site differs in is not sent
    header, _ = runtimes[1].reply("registration", "{}", b"")
    assert "bfloat16" not in header
    assert Registration.from_json(header).sections == runtimes[0].make_registration()[0].sections

    # the server is another machine, too
    result = serve_run(carrier, made.overlay({"local": {"micro_batch": 3}}), tmp_path / "run")
    assert result.run.settings.micro_batch == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run"]["micro_batch"] is None
    assert [r.lost for r in result.rounds] == [{}, {}, {}]
    assert [len(r.participants) for r in result.rounds[1:]] == [3, 3]
    losses = [r.values("loss", split="val") for r in result.rounds]
    assert all(last < first - 0.01 for first, last in zip(losses[0], losses[-1], strict=True))
    # each computes in its own precision
    assert len(set(losses[0])) == 3
    # what came of each client and round, what goes back, and what the server holds
    assert len(uploads) == 6
    assert {t.dtype for upload in uploads for _, t in tree.leaves(upload)} == {torch.float32}
    run = result.run
    down = run.method.download(run.state.server, run.federation.infos[0])
    assert {t.dtype for _, t in tree.leaves(down)} == {torch.float32}
    assert torch.bfloat16 not in {t.dtype for _, t in tree.leaves(run.state.server)}
    for runtime in runtimes:
        where = next(p for p in runtime.folder.iterdir() if p.is_dir() and (p / "model").is_dir())
        stored = json.loads((where / "model" / "adapter" / "fedlowrank.json").read_text())
        assert stored["digest"] == runtimes[0].language.loaded.digest


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_client_with_other_files_is_refused_and_the_file_is_named(
    name: str, base: Path, tmp_path: Path
) -> None:
    there = shutil.copytree(base, tmp_path / "there")
    content = (there / name).read_bytes()
    # the last weight, or a space at the end
    (there / name).write_bytes(
        content[:-1] + bytes([content[-1] ^ 1]) if name.endswith("tensors") else content + b" "
    )
    made = experiment(base, tmp_path)
    carrier = clients(made, tmp_path, {}, {"dtype": "bfloat16"}, {"path": str(there)})
    text = rf"missing: 2\..*client 2 has another base model than the others: {name} differs\. Copy the files"
    with pytest.raises(NetworkError, match=rf"(?s){text}"):
        serve_run(carrier, made, tmp_path / "run")


def test_an_app_that_is_sent_holds_nothing_of_this_machine(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(experiment(base, tmp_path).to_toml())
    assert main(["app", str(file), "-o", str(tmp_path / "app"), "local.dtype=bfloat16"]) == 0
    text = (tmp_path / "app" / "pyproject.toml").read_text()
    tables = json.loads(tomllib.loads(text)["tool"]["flwr"]["app"]["config"]["experiment"])
    assert "local" not in tables
    assert tables["language"]["path"] == str(base)
