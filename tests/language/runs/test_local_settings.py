"""The section [local]: what it changes on this machine, and that nothing else of a run depends on it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli import commands
from fedlowrank.cli.deployment.network_commands import read_experiment
from fedlowrank.cli.language_commands import language_of_run
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections.local_section import LocalSettings, describe_precision
from fedlowrank.config.stored_run import open_run
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.core.key import Key
from fedlowrank.language import base_model
from fedlowrank.language.base_model import (
    LanguageBase,
    has_bfloat16_instructions,
    load_base,
    warn_slow_precision,
)
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.language.language_model import LanguageSettings
from fedlowrank.network.messages import digest_sections
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.simulate import simulate
from fedlowrank.storage.run_files import CONFIG
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

SETTINGS = LanguageSettings("there", dtype="bfloat16", quantize="4bit", revision="main", context=9)


def test_what_is_set_replaces_the_fields_of_the_experiment_and_nothing_else() -> None:
    local = LocalSettings("here", "float32", "none", "eager", True, "bfloat16", True)
    actual = local.adapt_language(SETTINGS)
    assert actual == LanguageSettings(
        "here", dtype="float32", attention="eager", gradient_checkpointing=True, offline=True,
        context=9, autocast="bfloat16",
    )  # fmt: skip
    assert LocalSettings().adapt_language(SETTINGS) == SETTINGS
    run = RunSettings(rounds=3, micro_batch=2)
    assert LocalSettings(micro_batch=0).adapt_run(run) == RunSettings(rounds=3)
    assert LocalSettings(micro_batch=1).adapt_run(run) == RunSettings(rounds=3, micro_batch=1)
    assert LocalSettings().adapt_run(run) == run
    assert describe_precision(SETTINGS, run) == "base in bfloat16, 4bit, on cpu"
    assert describe_precision(actual, run) == "base in float32, autocast bfloat16, on cpu"


def test_wrong_settings_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    for local, text in (
        ({"dtype": "float8"}, r"local\.dtype"),
        ({"micro_batch": -1}, r"local\.micro_batch is a number of examples"),
        ({"device": "gpu"}, "'gpu'"),
        ({"rounds": 3}, r"local\.rounds"),
    ):
        with pytest.raises(ConfigError, match=text):
            ExperimentConfig.parse(make_causal_tables(llama, tmp_path, local=local))
    with pytest.raises(ConfigError, match=r"local\.dtype: this is of a language model; add \[language\]"):
        ExperimentConfig.parse({"local": {"dtype": "float32"}})


def test_the_compared_experiment_does_not_depend_on_it(llama: Path, tmp_path: Path) -> None:
    local = {"dtype": "bfloat16", "path": str(tmp_path), "micro_batch": 1, "attention": "eager"}
    plain, own = (
        ExperimentConfig.parse(make_causal_tables(llama, tmp_path, local=one)) for one in ({}, local)
    )
    assert own.to_dict()["local"] == local
    assert digest_sections(own.to_dict()) == digest_sections(plain.to_dict())
    assert (own.run, own.language) == (plain.run, plain.language)
    assert own.run_here.micro_batch == 1


def test_a_site_has_a_file_of_its_own_or_an_override(llama: Path, tmp_path: Path) -> None:
    everybody = write_toml(make_causal_tables(llama, tmp_path), tmp_path / "experiment.toml")
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "experiment.toml"\n[local]\ndtype = "bfloat16"\n')
    made = ExperimentConfig.read(everybody)
    for own in (ExperimentConfig.read(mine), read_experiment(everybody, ["local.dtype=bfloat16"], None)):
        assert own.language_here is not None
        assert own.language_here.dtype == "bfloat16"
        assert digest_sections(own.to_dict()) == digest_sections(made.to_dict())


def run_file(tables: dict[str, Any], folder: Path, out: str, *overrides: str) -> dict[str, Any]:
    """What ``run.json`` of a run from the command line holds."""
    file = write_toml(tables, folder / "e.toml")
    assert main(["run", str(file), "-o", str(folder / out), *overrides]) == 0
    actual: dict[str, Any] = json.loads((folder / out / CONFIG).read_text())
    return actual


@pytest.mark.full
def test_a_run_goes_on_with_another_precision_and_another_place_of_the_same_base(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int | None] = []

    def watched(*given: Any, **settings: Any) -> Any:
        taken.append(settings["micro_batch"])
        return simulate(*given, **settings)

    monkeypatch.setattr(commands, "simulate", watched)
    moved = shutil.copytree(llama, tmp_path / "moved")
    tables = make_causal_tables(llama, tmp_path, run={"rounds": 1})
    plain = run_file(tables, tmp_path, "plain")
    own = run_file(tables, tmp_path, "own", "local.dtype=bfloat16", "local.micro_batch=2")
    assert own["run"] == plain["run"]
    assert own["base"] == plain["base"]
    more = ["run.rounds=2", f"local.path={moved}", "local.dtype=float32", "local.micro_batch=0"]
    assert open_run(tmp_path / "own", "").settings.micro_batch == 2
    assert main(["resume", str(tmp_path / "own"), *more]) == 0
    assert taken == [None, 2, None]
    # and not with another base
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    tables = json.loads((tmp_path / "plain" / CONFIG).read_text())["experiment"]
    made = ExperimentConfig.parse({**tables, "local": {"path": str(moved)}})
    config = {**made.describe_run(), "vary": {}}
    with pytest.raises(CheckpointError, match=r"base\.files\.config\.json was"):
        simulate(
            made.build_method("fedhl"), made.federation(), folder=tmp_path / "plain", resume=True,
            config=config, **vars(made.run_here),
        )  # fmt: skip


def test_a_model_in_bfloat16_has_a_head_and_factors_in_float32(bert: Path) -> None:
    key = Key((7,))
    exact, half = (
        load_base(LanguageBase(str(bert), "classification", dtype), ("a", "b", "c"), key)
        for dtype in ("float32", "bfloat16")
    )
    types = {n: p.dtype for n, p in half.model.named_parameters()}
    assert {t for n, t in types.items() if n.startswith(half.head)} == {torch.float32}
    assert {t for n, t in types.items() if not n.startswith(half.head)} == {torch.bfloat16}
    tokens = torch.randint(5, 40, (3, 11), generator=key.generator())
    actual = half.model(tokens).logits
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), exact.model(tokens).logits, atol=0.02, rtol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedhl", "flora"])
def test_what_travels_is_float32_whatever_the_dtype(method: str, llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, method=method, local={"dtype": "bfloat16"}), 0)
    model = run.federation.architectures["language"]
    assert {t.dtype for t in model.initial.values()} == {torch.float32}
    assert model.module.get_base_model().dtype == torch.bfloat16
    run.step()
    sent = run.method.download(run.state.server, run.federation.infos[0])
    types = {t.dtype for _, t in tree.leaves(sent) if t.is_floating_point()}
    assert torch.bfloat16 not in types
    assert torch.float32 in types


@pytest.mark.full
def test_a_classifier_in_bfloat16_sends_its_head_in_float32(bert: Path, tmp_path: Path) -> None:
    rows = [
        {"text": ["a fox jumps", "a dog sleeps", "1 + 1"][i % 3] + f" {i % 5}", "label": i % 3}
        for i in range(60)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    tables = make_causal_tables(bert, tmp_path, lora={"target_modules": ["query", "value"]})
    tables["data"] = {"source": "text_classes", "path": str(tmp_path / "c.jsonl")}
    tables["language"] = {"path": str(bert), "task": "classification"}
    losses = {}
    for dtype in ("float32", "bfloat16"):
        run = run_rounds({**tables, "local": {"dtype": dtype}}, 0)
        down = run.method.download(run.state.server, run.federation.infos[0])
        heads = {path: t.dtype for path, t in tree.leaves(down) if "classifier" in str(path)}
        assert len(heads) == 2
        assert {t.dtype for _, t in tree.leaves(down)} == {torch.float32}
        losses[dtype] = [
            run.record_initial_models().values("loss", split="val"),
            run.step().values("loss", split="val"),
        ]
    torch.testing.assert_close(
        torch.tensor(losses["bfloat16"]), torch.tensor(losses["float32"]), atol=0.02, rtol=0
    )


@pytest.mark.full
def test_adapters_name_the_digest_of_the_files_that_they_are_for(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(
        llama, tmp_path, method="fedex_lora", lora={"ranks": [2]}, local={"dtype": "bfloat16"}
    )
    run = run_rounds(tables, 1)
    language = language_of_run(run)

    def digest(folder: Path) -> str:
        names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        files = {n: hashlib.blake2b((folder / n).read_bytes(), digest_size=16).hexdigest() for n in names}
        return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()

    for form, base in (("adapters", llama), ("exact", tmp_path / "exact" / "base")):
        language.write(run, tmp_path / form, ExportSettings(form=form))  # type: ignore[arg-type]
        stored = json.loads((tmp_path / form / "client_0001" / "fedlowrank.json").read_text())
        assert stored["digest"] == digest(base)
    assert digest(llama) != digest(tmp_path / "exact" / "base")


@pytest.mark.full
def test_the_digest_of_a_name_on_the_hub_is_of_its_downloaded_snapshot(llama: Path, tmp_path: Path) -> None:
    commit = "0" * 39 + "1"
    store = tmp_path / "hub" / "models--one--model"
    shutil.copytree(llama, store / "snapshots" / commit)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(commit)
    program = (
        "import json; from fedlowrank.core.key import Key\n"
        "from fedlowrank.language.base_model import LanguageBase, load_base\n"
        "found = load_base(LanguageBase('one/model', offline=True), (), Key((7,)))\n"
        "print(json.dumps(dict(found.files)))"
    )
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == load_base(LanguageBase(str(llama)), (), Key((7,))).files


CPUS = {
    "flags\t\t: fpu sse avx512bw avx512_bf16 amx_tile\n": True,
    "flags\t\t: fpu amx_bf16\n": True,
    "flags\t\t: fpu avx2 avx512bw\nvmx flags\t: avx512_bf16\n": False,
    "Features\t: fp asimd bf16 i8mm\n": True,
    "Features\t: fp asimd i8mm\n": False,
    "cpu\t: POWER9\n": True,
}


@pytest.mark.parametrize("text", CPUS)
def test_a_cpu_says_whether_it_multiplies_in_bfloat16(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert has_bfloat16_instructions(file) is CPUS[text]
    assert has_bfloat16_instructions(tmp_path / "missing")


def test_bfloat16_on_a_cpu_without_it_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(base_model, "has_bfloat16_instructions", lambda: False)
    made = ExperimentConfig.parse(make_causal_tables(llama, tmp_path, local={"dtype": "bfloat16"}))
    with pytest.warns(RuntimeWarning, match=r"many times slower.*local\.dtype=float32"):
        made.load_language(())
    half = shutil.copytree(llama, tmp_path / "half")
    load_base(LanguageBase(str(llama), dtype="bfloat16"), (), Key((0,))).model.save_pretrained(half)
    made = ExperimentConfig.parse(make_causal_tables(half, tmp_path, local={"dtype": "auto"}))
    with pytest.warns(RuntimeWarning, match=r"dtype bfloat16: this CPU has no"):
        made.shares()
    with pytest.warns(RuntimeWarning, match=r"local\.autocast=none"):
        warn_slow_precision("float32", "bfloat16", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_slow_precision("float32", "none", "cpu")
        warn_slow_precision("bfloat16", "bfloat16", "cuda:0")
        monkeypatch.setattr(base_model, "has_bfloat16_instructions", lambda: True)
        warn_slow_precision("bfloat16", "bfloat16", "cpu")
