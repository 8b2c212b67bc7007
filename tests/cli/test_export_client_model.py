"""A client's model out of a finished run, from the command line and from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from fedlowrank.adapters import deployment as deploy
from fedlowrank.adapters import thin_layers as thin
from fedlowrank.cli import commands
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.simulate import reopen, simulate
from fedlowrank.testing.check import small_federation
from tests.cli.small_experiment import SMALL, done, files, refused, write

torch.set_num_threads(1)

# digits and a wide hidden layer, at penalties that leave few ranks and few entries
FEDSLR = (
    SMALL.replace('source = "iris"', 'source = "digits"').replace("hidden = [4]", "hidden = [64]")
    + "[methods.fedslr]\nlam = 0.06\nmu = 0.2\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("export")
    made = ExperimentConfig.read(where / write(where, FEDSLR))
    commands.run_method(made, "fedslr", made.federation(), where / "run")
    return where / "run"


def run_of(folder: Path) -> Run:
    made = ExperimentConfig.parse(RunRecord.load(folder).config["experiment"])
    return reopen(
        made.build_method("fedslr"),
        made.federation(),
        folder,
        made.run,
        {**made.describe("fedslr"), "vary": {}},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("series", ["mixed", "gkr"])
@pytest.mark.parametrize("layout", ["small", "fast"])
def test_the_file_is_the_client_s_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], series: str, layout: str
) -> None:
    out = tmp_path / "model.safetensors"
    before = files(folder)
    said = done(
        capsys, "export", str(folder), "--client", "1", "--series", series, "--layout", layout, "-o", str(out)
    )  # fmt: skip
    assert files(folder) == before
    assert "client 1, after round 2" in said
    assert "100.0 %" in said
    run = run_of(folder)
    module, x = run.task.model(run.federation.infos[1]).module, run.federation.clients[1].test.x
    dense = run.state.server.w.dense(run.task.common_model("").initial)
    if series == "mixed":
        dense = {n: w + run.state.clients[1].p[n] for n, w in dense.items()}
    made = deploy.load_deployed(module, out)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), functional_call(module, dense, (x,)), rtol=1e-4, atol=1e-5)
    whole = sum(p.numel() for p in dense.values())
    assert f"{whole:,}" in said
    assert deploy.measure_size(made).nbytes < 4 * whole
    assert out.stat().st_size < 4 * whole


@pytest.mark.full
def test_the_model_travels_to_another_process_and_its_class(folder: Path) -> None:
    run = run_of(folder)
    made = simulate(run.method, run.federation, rounds=1).deploy(0, "gkr")
    assert any(isinstance(m, thin.CompressedLayer) for m in made.modules())
    assert isinstance(made, type(run.task.model(run.federation.infos[0]).module))


def test_a_method_without_parts_exports_its_headline_alone(folder: Path) -> None:
    federation = run_of(folder).federation
    result = simulate("ditto", federation, rounds=1)
    made, x = result.deploy(2), federation.clients[2].test.x
    with torch.inference_mode():
        model = federation.architectures["mlp"]
        torch.testing.assert_close(made(x), model.apply(result.personal(2), x), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="series 'global' is made of; only 'personal'"):
        result.deploy(2, "global")


def test_what_is_not_there_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no client 3; they are numbered from 0 to 2" in refused(
        capsys, "export", str(folder), "--client", "3"
    )
    assert "'mixed'" in refused(capsys, "export", str(folder), "--series", "mixd")
    assert "not a run folder" in refused(capsys, "export", str(tmp_path))
    assert "cannot write" in refused(capsys, "export", str(folder), "-o", "missing/model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_a_client_that_infers_by_several_models_has_none_to_export() -> None:
    result = simulate("ensemble", small_federation(False), rounds=1)
    with pytest.raises(ConfigError, match=r"Ensemble infers by more than one model at client 2"):
        result.deploy(2)
    assert simulate("floral", small_federation(False), rounds=1).deploy(2)(torch.zeros(2, 6)).shape == (2, 3)
