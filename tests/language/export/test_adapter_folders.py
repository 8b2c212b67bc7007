"""Which folders a run's models become: what is written once, what is kept whole, and adapters of a chosen rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedlowrank.cli.language_commands import language_of_run
from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.linalg.pair import Pair
from fedlowrank.linalg.truncation import relative_error, truncate_update
from tests.language.peft_scores import make_half_dense_tables, score_in_memory, score_with_peft, take_inputs
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["flora", "fedex_lora"])
def test_a_base_that_moved_is_written_once(method: str, llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, method=method, lora={"ranks": [2]}))
    out = tmp_path / "out"
    written = language_of_run(run).write(run, out, ExportSettings(form="exact"))
    names = ["base", "client_0000", "client_0001", "client_0002", "server"]
    assert sorted(p.name for p in written) == sorted(p.name for p in out.iterdir()) == names
    whole = [p.parent.name for p in out.glob("*/model*.safetensors")]
    assert whole == ["base"]
    size = sum(p.stat().st_size for p in (out / "base").glob("*.safetensors"))
    for k in range(3):
        folder = out / f"client_{k:04d}"
        torch.testing.assert_close(
            score_with_peft(out / "base", folder, take_inputs(run)),
            score_in_memory(run, k),
            rtol=0,
            atol=1e-5,
        )
        assert (folder / "adapter_model.safetensors").stat().st_size < size / 4
        config = json.loads((folder / "adapter_config.json").read_text())
        assert Path(config["base_model_name_or_path"]) == out / "base"
    torch.testing.assert_close(
        score_with_peft(llama, out / "server", take_inputs(run)),
        score_in_memory(run, None),
        rtol=0,
        atol=1e-5,
    )


def test_layers_that_are_matrices_are_kept_whole_and_the_others_are_factors(
    llama: Path, tmp_path: Path
) -> None:
    run = run_rounds(make_half_dense_tables(llama, tmp_path))
    deltas = run.state.server.delta
    dense = {n for n, d in deltas.items() if d.matrix is not None}
    assert dense
    assert dense != set(deltas)
    folder = language_of_run(run).write_one(
        tmp_path / "server", run.local_model(run.federation.infos[0]).server, 3, None
    )
    torch.testing.assert_close(
        score_with_peft(llama, folder, take_inputs(run)), score_in_memory(run, None), rtol=0, atol=1e-5
    )
    stored = {n.removeprefix("base_model.model.") for n in load_file(folder / "adapter_model.safetensors")}
    assert {n.partition(".lora_")[0] for n in stored if ".lora_" in n} == set(deltas) - dense
    assert {n.removesuffix(".weight") for n in stored if ".lora_" not in n} == dense
    # it is far from the base, so that a folder that changes nothing would be noticed
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(llama)(**take_inputs(run)).logits
    assert float((base - score_in_memory(run, None)).abs().max()) > 1e-3


@pytest.mark.full
def test_adapters_of_a_rank_say_how_far_they_are(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_toml(make_half_dense_tables(llama, tmp_path), tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["adapters", str(tmp_path / "run"), "-o", str(out), "--rank", "4"]) == 0
    printed = capsys.readouterr().out
    run = run_rounds(make_half_dense_tables(llama, tmp_path))
    told = json.loads((out / "server" / "fedlowrank.json").read_text())["truncation"]
    lost = energy = 0.0
    updates = {}
    for name, delta in run.state.server.delta.items():
        u, s, vt = np.linalg.svd(delta.dense().double().numpy())
        assert told["layers"][name] == pytest.approx(np.sqrt((s[4:] ** 2).sum() / (s**2).sum()), rel=1e-3)
        assert told["layers"][name] > 1e-3
        updates[name] = (u[:, :4] * s[:4]) @ vt[:4]
        lost, energy = lost + (s[4:] ** 2).sum(), energy + (s**2).sum()
    assert told["rank"] == 4
    assert told["error"] == pytest.approx(np.sqrt(lost / energy), rel=1e-3)
    readme = (out / "server" / "README.md").read_text()
    for text in (printed, readme):
        assert f"{told['error']:.3g}" in text
        for name, error in told["layers"].items():
            assert name in text.replace("\n", "")
            assert f"{error:.3g}" in text
    # PEFT computes the base with the truncated update
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for name, update in updates.items():
            plain.get_submodule(name).weight += torch.from_numpy(update).float()
        expected = plain(**take_inputs(run)).logits
    torch.testing.assert_close(
        score_with_peft(llama, out / "server", take_inputs(run)), expected, rtol=0, atol=1e-4
    )
    # clients of no higher rank lose nothing
    for k in range(3):
        torch.testing.assert_close(
            score_with_peft(llama, out / f"client_{k:04d}", take_inputs(run)),
            score_in_memory(run, k),
            rtol=0,
            atol=1e-4,
        )
    assert main(["adapters", str(tmp_path / "run"), "-o", str(out), "--rank", "0"]) != 0
    # what was written before is kept
    (out / "mine.txt").write_text("notes")
    capsys.readouterr()
    again = ["adapters", str(tmp_path / "run"), "-o", str(out), "--rank", "2"]
    assert main(again) == 1
    assert "not empty" in capsys.readouterr().err
    assert json.loads((out / "server" / "fedlowrank.json").read_text())["truncation"]["rank"] == 4
    assert main([*again, "--force"]) == 0
    assert (tmp_path / "out.old-1" / "mine.txt").read_text() == "notes"
    assert json.loads((out / "server" / "fedlowrank.json").read_text())["truncation"]["rank"] == 2


@pytest.mark.parametrize("kind", ["factors", "matrix"])
def test_the_truncation_is_that_of_numpy(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        Pair(*(torch.randn(s, generator=generator) for s in ((d, 5), (5, k)))) for d, k in ((9, 7), (6, 60))
    ]
    parts, lost, energy = [], 0.0, 0.0
    for pair in pairs:
        w = pair.b.double().numpy() @ pair.a.double().numpy()
        actual = truncate_update(pair if kind == "factors" else torch.from_numpy(w), 3)
        u, s, vt = np.linalg.svd(w, full_matrices=False)
        np.testing.assert_allclose(
            actual.pair.dense().double().numpy(), (u[:, :3] * s[:3]) @ vt[:3], atol=1e-4
        )
        assert actual.error == pytest.approx(np.sqrt((s[3:] ** 2).sum() / (s**2).sum()), rel=1e-9)
        assert truncate_update(pair, 5).error < 1e-14
        assert truncate_update(pair, 50).pair.rank <= 7
        parts.append(actual)
        lost, energy = lost + (s[3:] ** 2).sum(), energy + (s**2).sum()
    assert relative_error(parts) == pytest.approx(np.sqrt(lost / energy), rel=1e-9)
    nothing = truncate_update(Pair(torch.zeros(4, 1), torch.ones(1, 3)), 2)
    assert (nothing.error, nothing.pair.rank) == (0.0, 2)
    assert truncate_update(torch.zeros(4, 3), 2).error == 0.0
    with pytest.raises(ConfigError, match="at least 1; it is 0"):
        truncate_update(pairs[0], 0)
