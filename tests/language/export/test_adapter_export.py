"""What `fedlowrank adapters` writes: adapters of the largest client rank, the exact form, whole models, and cards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fedlowrank.cli.language_commands import language_of_run
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.stored_run import open_run
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.language.export.model_card import CardModel, RunFacts, format_card
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run import Run
from tests.language.peft_scores import make_half_dense_tables, score_in_memory, score_with_peft, take_inputs
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

MAX_LORA_RANK = 16
"""Of vLLM, unless it is started with another --max-lora-rank."""


@pytest.fixture(scope="module")
def stored(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedHL, some of whose server's updates are full matrices, and clients of ranks 4, 2 and 1."""
    folder = tmp_path_factory.mktemp("stored")
    file = write_toml(
        make_half_dense_tables(llama, folder, split={"train": 0.6, "val": 0.3}), folder / "e.toml"
    )
    assert main(["run", str(file), "-o", str(folder / "run")]) == 0
    return folder / "run"


def export(run: Path, out: Path, *options: str) -> Path:
    assert main(["adapters", str(run), "-o", str(out), *options]) == 0
    return out


def truncation(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((folder / "fedlowrank.json").read_text())["truncation"]
    return actual


def config_of(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return actual


def best_of_rank(run: Run, rank: int) -> tuple[dict[str, np.ndarray], float]:
    """The best approximations of the server's updates by NumPy in float64, and their relative error."""
    updates, lost, energy = {}, 0.0, 0.0
    for name, delta in run.state.server.delta.items():
        u, s, vt = np.linalg.svd(delta.dense().double().numpy())
        updates[name] = (u[:, :rank] * s[:rank]) @ vt[:rank]
        lost, energy = lost + (s[rank:] ** 2).sum(), energy + (s**2).sum()
    return updates, float(np.sqrt(lost / energy))


def with_updates(base: Path, updates: dict[str, np.ndarray], x: dict[str, Tensor]) -> Tensor:
    """Scores of the base with updates added to its weights, by transformers in float64."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        for name, update in updates.items():
            plain.get_submodule(name).weight += torch.from_numpy(update)
        scores: Tensor = plain(**x).logits
    return scores.float()


def is_plain_adapter(folder: Path) -> bool:
    """Whether vLLM and llama.cpp load a folder: only factors, of a rank that is not too large, and no variants."""
    config, tensors = config_of(folder), load_file(folder / "adapter_model.safetensors")
    plain = config["modules_to_save"] is None and config["bias"] == "none" and not config["use_dora"]
    plain &= not config["rank_pattern"] and not config["alpha_pattern"] and not config["use_rslora"]
    names = [n.removeprefix("base_model.model.") for n in tensors]
    factors = all(n.endswith((".lora_A.weight", ".lora_B.weight")) and "base_model" not in n for n in names)
    ranks = {t.shape[0] if ".lora_A." in n else t.shape[1] for n, t in tensors.items()}
    # llama.cpp takes α from the file and r from the tensors
    return (
        plain
        and factors
        and ranks == {config["r"]} == {config["lora_alpha"]}
        and config["r"] <= MAX_LORA_RANK
    )


def test_by_default_every_model_is_an_adapter_of_the_largest_client_rank(
    stored: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = export(stored, tmp_path / "out"), open_run(stored, "")
    printed = capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == ["client_0000", "client_0001", "client_0002", "server"]
    assert all(is_plain_adapter(folder) for folder in out.iterdir())
    assert [config_of(out / f"client_{k:04d}")["r"] for k in range(3)] == [4, 2, 1]
    updates, error = best_of_rank(run, 4)
    told = truncation(out / "server")
    assert error > 1e-3
    assert told["rank"] == config_of(out / "server")["r"] == 4
    assert told["error"] == pytest.approx(error, rel=1e-3)
    for text in (printed, (out / "server" / "README.md").read_text()):
        assert f"{told['error']:.3g}" in text
    torch.testing.assert_close(
        score_with_peft(llama, out / "server", take_inputs(run)),
        with_updates(llama, updates, take_inputs(run)),
        rtol=0,
        atol=1e-4,
    )
    # a client's model is an adapter already
    for k in range(3):
        assert set(truncation(out / f"client_{k:04d}")["layers"].values()) == {0.0}
        torch.testing.assert_close(
            score_with_peft(llama, out / f"client_{k:04d}", take_inputs(run)),
            score_in_memory(run, k),
            rtol=0,
            atol=1e-5,
        )


def test_a_layer_is_stored_whole_only_in_the_exact_form(stored: Path, llama: Path, tmp_path: Path) -> None:
    out, run = export(stored, tmp_path / "out", "--exact", "--no-card"), open_run(stored, "")
    assert not is_plain_adapter(out / "server")
    assert config_of(out / "server")["modules_to_save"]
    told = export(stored, tmp_path / "cards", "--exact") / "server" / "README.md"
    for name in config_of(out / "server")["modules_to_save"]:
        assert name in told.read_text().partition("These layers are stored whole: ")[2]
    assert "truncation" not in json.loads((out / "server" / "fedlowrank.json").read_text())
    assert not list(out.glob("*/README.md"))
    torch.testing.assert_close(
        score_with_peft(llama, out / "server", take_inputs(run)),
        score_in_memory(run, None),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [[], ["--rank", "2"], ["--exact"]])
def test_a_merged_model_is_the_base_plus_the_adapter(
    options: list[str], stored: Path, llama: Path, tmp_path: Path
) -> None:
    out, run = export(stored, tmp_path / "out", "--merged", *options), open_run(stored, "")
    whole = AutoModelForCausalLM.from_pretrained(out / "server_merged")
    assert whole.dtype == torch.float32
    with torch.no_grad():
        scores = whole(**take_inputs(run)).logits
    torch.testing.assert_close(
        scores, score_with_peft(llama, out / "server", take_inputs(run)), rtol=0, atol=1e-5
    )
    assert float((scores - with_updates(llama, {}, take_inputs(run))).abs().max()) > 1e-3
    card = (out / "server_merged" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"


@pytest.mark.full
def test_a_merged_model_has_the_dtype_of_the_base(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_half_dense_tables(llama, tmp_path, language={"dtype": "bfloat16"}))
    out = tmp_path / "out"
    language_of_run(run).write(run, out, ExportSettings(merged=True))
    merged = load_file(out / "server_merged" / "model.safetensors")
    factors = load_file(out / "server" / "adapter_model.safetensors")
    base, changed = load_file(llama / "model.safetensors"), 0
    for name, weight in merged.items():
        assert weight.dtype == torch.bfloat16
        factor = f"base_model.model.{name.removesuffix('.weight')}.lora_%s.weight"
        expected = base[name].to(torch.bfloat16).double()
        if factor % "A" in factors:
            expected += factors[factor % "B"].double() @ factors[factor % "A"].double()
            changed += 1
        torch.testing.assert_close(weight.double(), expected, rtol=2**-8, atol=1e-6)
    assert changed == 4


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["flora", "fedex_lora"])
def test_a_base_that_moved_becomes_part_of_the_adapters(method: str, llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, method=method, lora={"ranks": [2]}))
    # above the rank of every update, so that nothing is lost
    written = language_of_run(run).write(run, tmp_path / "out", ExportSettings(rank=16))
    assert all(is_plain_adapter(folder) for folder in written)
    assert max(truncation(folder)["error"] for folder in written) < 1e-5
    for k in (None, 0, 2):
        folder = tmp_path / "out" / ("server" if k is None else f"client_{k:04d}")
        torch.testing.assert_close(
            score_with_peft(llama, folder, take_inputs(run)), score_in_memory(run, k), rtol=0, atol=1e-4
        )
    language_of_run(run).write(run, tmp_path / "small")
    assert config_of(tmp_path / "small" / "server")["r"] == 2
    assert truncation(tmp_path / "small" / "server")["error"] > 1e-3


def test_a_plain_adapter_is_written_exactly(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, method="fedit", lora={"ranks": [2]}))
    out = tmp_path / "out"
    language_of_run(run).write(run, out)
    scale = 2.0  # lora_alpha / r
    # FedIT sends all clients the server's model
    params = run.personal_params(run.federation.infos[0])
    stored = load_file(out / "server" / "adapter_model.safetensors")
    for name, value in stored.items():
        own = params[name.replace(".weight", ".default.weight")]
        assert torch.equal(value, own if ".lora_A." in name else own * scale)
    assert truncation(out / "server") == {
        "rank": 2,
        "error": 0.0,
        "layers": {f"model.layers.{i}.self_attn.{m}": 0.0 for i in (0, 1) for m in ("q_proj", "v_proj")},
    }


def test_a_method_without_a_model_of_the_server_has_none_to_merge(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, method="fedsa_lora", lora={"ranks": [2]}), 1)
    written = language_of_run(run).write(run, tmp_path / "out")
    assert [p.name for p in written] == ["client_0000", "client_0001", "client_0002"]
    with pytest.raises(TaskError, match="no model of the server"):
        language_of_run(run).write(run, tmp_path / "merged", ExportSettings(merged=True))


def test_the_section_export_says_the_form(llama: Path, tmp_path: Path) -> None:
    tables = make_half_dense_tables(
        llama, tmp_path, export={"rank": 1, "base_model": "me/base", "card": False, "merged": True}
    )
    file = write_toml({**tables, "run": {**tables["run"], "adapters": [1]}}, tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    early = tmp_path / "run" / "adapters" / "round-0001"
    # a whole model is written by the command alone
    assert not (early / "server_merged").exists()
    out = export(tmp_path / "run", tmp_path / "out")
    assert (out / "server_merged" / "model.safetensors").is_file()
    for folder in (early / "server", early / "client_0000", out / "server", out / "client_0000"):
        assert config_of(folder)["r"] == 1
        assert config_of(folder)["base_model_name_or_path"] == "me/base"
        assert not (folder / "README.md").exists()
    other = export(tmp_path / "run", tmp_path / "other", "--rank", "3", "--base-model", "you/base")
    assert config_of(other / "server")["r"] == 3
    assert config_of(other / "server")["base_model_name_or_path"] == "you/base"
    exact = export(tmp_path / "run", tmp_path / "exact", "--exact")
    assert config_of(exact / "server")["modules_to_save"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"rank": 0}, "export.rank"),
    "rank of the exact form": ({"rank": 2, "form": "exact"}, "leave one of the two out"),
    "a path": ({"base_model": "/a/base"}, "OWNER/NAME"),
    "no owner": ({"push": "adapter"}, "OWNER/NAME"),
    "unknown": ({"ranks": 2}, "rank"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_export_is_refused(case: str, llama: Path, tmp_path: Path) -> None:
    wrong, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        ExperimentConfig.parse(make_causal_tables(llama, tmp_path, export=wrong))


def test_other_models_have_no_section_export() -> None:
    with pytest.raises(ConfigError, match=r"add \[language\]"):
        ExperimentConfig.parse({"export": {"rank": 2}})


def test_wrong_options_are_refused_before_anything_is_written(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for options, said in (
        (["--exact", "--rank", "2"], "leave one of the two out"),
        (["--push"], "OWNER/NAME"),
    ):
        assert main(["adapters", str(stored), "-o", str(out), *options]) == 1
        assert said in capsys.readouterr().err
    assert not out.exists()


def test_the_card_says_what_was_trained_and_how_well(stored: Path, llama: Path, tmp_path: Path) -> None:
    card = (export(stored, tmp_path / "out") / "server" / "README.md").read_text()
    run, records = open_run(stored, ""), RunRecord.load(stored).rounds
    _, front, _ = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": str(llama),
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["fedlowrank", "federated-learning", "lora"],
    }
    assert "after 2 rounds of federated fine-tuning by FedHL" in card
    for info, rank in zip(run.federation.infos, (4, 2, 1), strict=True):
        assert f"| {info.id} | {info.example_count} | {rank} |" in card
    # an independent mean over the clients
    best = min(
        (r for r in records if r.validation() == max(r.validation() for r in records)), key=lambda r: r.round
    )
    values = [np.mean(np.array(r.values("loss", split="test"), float)) for r in (records[-1], best)]
    assert f"| test loss | {values[0]:.4g} | {values[1]:.4g} |" in card
    assert "Privacy: none" in card
    assert "| torch | " in card
    assert "- Objective: cross-entropy of the next token\n" in card
    for name, error in truncation(tmp_path / "out" / "server")["layers"].items():
        assert f"| {name} | {error:.3g} |" in card
    assert "```text\n{instruction}\n\n```" in card
    told = json.loads((tmp_path / "out" / "server" / "fedlowrank.json").read_text())
    assert (told["prompt_format"], told["prompt"]) == ("plain", "{instruction}\n")


def test_the_card_of_a_private_run_has_its_epsilon(llama: Path, tmp_path: Path) -> None:
    private = {"privacy": {"kind": "central", "noise": 2.0, "delta": 0.01}, "clipping": {"norm": 1.0}}
    tables = make_causal_tables(
        llama, tmp_path, method="fedit", lora={"ranks": [2]}, run={**private, "participation": 0.7}
    )
    file = write_toml(tables, tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    card = (export(tmp_path / "run", tmp_path / "out") / "server" / "README.md").read_text()
    spent = RunRecord.load(tmp_path / "run").rounds[-1].server_metrics["privacy"]["epsilon"]
    assert spent > 0
    assert f"(central differential privacy) ε = {spent:.4g} at δ = 0.01" in card


def test_the_card_of_many_clients_has_ranges() -> None:
    facts = RunFacts(
        "FedHL", "", 3, ((10, 4), (30, 2), *((20, 2),) * 30), None, (), None, None, {"torch": "2"}, "a loss"
    )
    card = format_card(CardModel("me/base", None, True, rank=4), facts)
    assert "Clients: 32, with 640 training examples together" in card
    assert "Training examples of a client: 10 to 30" in card
    assert "LoRA rank of a client: 2 to 4" in card
    assert "| 0 | 10 |" not in card
    few = format_card(CardModel("me/base", 1, True, rank=4), dataclasses.replace(facts, clients=((10, 4),)))
    assert "The model of client 1" in few
    assert "| 0 | 10 | 4 |" in few


def test_one_model_is_truncated_only_if_a_rank_is_set(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_half_dense_tables(llama, tmp_path))
    params, language = run.local_model(run.federation.infos[0]).server, language_of_run(run)
    assert params is not None
    assert config_of(language.write_one(tmp_path / "exact", params, 2, None))["modules_to_save"]
    ranked = dataclasses.replace(language, export=ExportSettings(rank=3))
    folder = ranked.write_one(tmp_path / "ranked", params, 2, None)
    assert config_of(folder)["r"] == 3
    assert is_plain_adapter(folder)
    assert truncation(folder)["error"] == pytest.approx(best_of_rank(run, 3)[1], rel=1e-3)


@pytest.mark.full
def test_the_adapter_of_a_classifier_holds_its_head(bert: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{['a fox', 'a dog'][i % 2]} {i % 5}", "label": i % 2} for i in range(40)]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    tables = make_causal_tables(bert, tmp_path, lora={"target_modules": ["query", "value"]})
    tables["data"] = {"source": "text_classes", "path": str(path), "normalize": "none"}
    tables["language"] = {"path": str(bert), "task": "classification", "context": 32}
    run = run_rounds(tables)
    language_of_run(run).write(run, tmp_path / "out")
    base = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)
    with torch.no_grad():
        scores = PeftModel.from_pretrained(base, tmp_path / "out" / "client_0001")(**take_inputs(run)).logits
    torch.testing.assert_close(scores, score_in_memory(run, 1), rtol=0, atol=1e-5)
    told = json.loads((tmp_path / "out" / "server" / "fedlowrank.json").read_text())
    assert "prompt" not in told
    assert "pipeline_tag: text-classification" in (tmp_path / "out" / "server" / "README.md").read_text()


ROWS: dict[str, Any] = {
    "causal": lambda i: {"prompt": f"{i}?", "completion": " a fox"},
    "classification": lambda i: {"text": f"fox {i}", "label": ["a fox", "a dog", "é"][i % 3]},
    "token_classification": lambda i: {"tokens": ["fox", f"{i}"], "ner_tags": [["A", "B", "C"][i % 3], "O"]},
    "embedding": lambda i: {"anchor": f"who is {i}", "positive": f"fox {i}"},
}
"""A row of the data of each task."""


@pytest.mark.parametrize("task", ROWS)
def test_the_code_of_the_card_loads_what_was_trained(
    task: Any, llama: Path, bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(ROWS[task](i)) for i in range(30)))
    base = llama if task == "causal" else bert
    tables = make_causal_tables(base, tmp_path, method="fedit", run={"rounds": 1})
    tables["data"] = {"source": "text", "path": str(tmp_path / "rows.jsonl"), "normalize": "none"}
    tables["partition"] = {"kind": "iid", "clients": 2}
    tables["language"] = {"path": str(base), "task": task, "context": 32}
    tables["lora"] = {"r": 2, "target_modules": ["q_proj" if task == "causal" else "query"]}
    tables["loss"] = {"kind": "contrastive" if task == "embedding" else "auto"}
    run = run_rounds(tables)
    language = language_of_run(run)
    (folder,) = [f for f in language.write(run, tmp_path / "out") if f.name == "server"]
    card = (folder / "README.md").read_text()
    names: dict[str, Any] = {}
    code = card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(folder))
    exec(code, names)
    loaded = names["model"].eval()
    x = language.loaded.tokenizer(["a fox", "the dog sleeps"], return_tensors="pt", padding=True)
    with torch.no_grad(), language.use_parameters(run.personal_params(run.federation.infos[0])) as own:
        actual, expected = loaded(**x), own(**x)
    if task == "embedding":
        torch.testing.assert_close(actual.last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)
    classes = run.federation.classes
    stored = json.loads((folder / "fedlowrank.json").read_text())
    assert tuple(stored.get("classes", ())) == classes
    if classes:
        assert loaded.config.id2label == dict(enumerate(classes))
        assert loaded.config.label2id == {name: i for i, name in enumerate(classes)}
