"""Whole runs of federated fine-tuning on tiny models: files in, adapters out; killed, resumed, in parts, recomputed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedlowrank.cli.language_commands import language_of_run, scores
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.stored_run import open_run
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, FedlowrankError, TaskError
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.scores import PerplexityTask
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage import checkpoint
from fedlowrank.storage.run_files import RECORDS_FILE, read_lines
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)

EQUAL_RANKS = ["fedit", "fedex_lora", "fedavg", "ditto"]
FORMS = ["fedhl", "hetlora", "flora", "fedit", "fedex_lora", "fedavg", "ditto"]
"""A method of each form of upload and of personal model."""


@pytest.mark.full
@pytest.mark.parametrize("method", FORMS)
def test_methods_of_each_form_fine_tune_a_causal_model(method: str, llama: Path, tmp_path: Path) -> None:
    ranks = {"ranks": [2]} if method in EQUAL_RANKS else {}
    run = run_rounds(make_causal_tables(llama, tmp_path, method=method, lora=ranks, run={"rounds": 3}), 0)
    base = {n: p.clone() for n, p in language_of_run(run).model.named_parameters()}
    before = run.record_initial_models().values("loss", split="val")
    for _ in range(3):
        after = run.step().values("loss", split="val")
    # the mean loss of the headline series falls: the adapters learn although nothing else is trained
    assert sum(after) < sum(before) - 0.01
    for name, p in language_of_run(run).model.named_parameters():
        assert torch.equal(p, base[name]), f"{name} of the shared base changed"


@pytest.mark.full
def test_clients_share_one_base_and_hold_factors_alone(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path))
    model = language_of_run(run).model
    whole = sum(p.numel() for p in model.parameters())
    held = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in held)
    assert set(run.federation.architectures["language"].initial) == held
    for state in run.state.clients.values():
        assert tree.numel(state) < whole / 10
    uploads = run.step()
    assert uploads.parameters_up < 3 * whole / 10


@pytest.mark.few(1)
@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_the_head_of_a_classifier_is_what_the_settings_say(head: str, bert: Path, tmp_path: Path) -> None:
    rows = [
        {"text": ["a fox jumps", "a dog sleeps", "1 + 1"][i % 3] + f" {i % 5}", "label": i % 3}
        for i in range(60)
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    tables = make_causal_tables(
        bert,
        tmp_path,
        data={"source": "text_classes", "path": str(path)},
        language={"path": str(bert), "task": "classification"},
        lora={"target_modules": ["query", "value"]},
        methods={"fedhl": {"training": {"head": head}}},
        run={"rounds": 2},
    )
    for field in ("prompt", "response", "category"):
        del tables["data"][field]
    del tables["language"]["format"]
    run = run_rounds(tables)
    names = [n for n in run.federation.architectures["language"].initial if "classifier" in n]
    assert len(names) == 2
    initial = run.federation.architectures["language"].initial
    shared = {n for n in names if n in run.state.server.rest}
    own = {n for s in run.state.clients.values() for n in s}
    assert (shared, own) == {
        "shared": (set(names), set()),
        "personal": (set(), set(names)),
        "frozen": (set(), set()),
    }[head]
    for info in run.federation.infos:
        used = run.personal_params(info)
        assert (head == "frozen") == all(torch.equal(used[n], initial[n]) for n in names)
    folder = language_of_run(run).write_one(tmp_path / "adapter", used, 4, info.id)
    stored = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(stored[n], used[n]) for n in names)


def test_adapters_of_a_run_load_in_peft_and_give_the_same_scores(llama: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # exact: the server's W stays factors, so that it can leave as an adapter too
    tables = make_causal_tables(
        llama, tmp_path, methods={"fedhl": {"delta_form": {"kind": "exact"}}}, run={"adapters": [1]}
    )
    file = write_toml(tables, tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    early = tmp_path / "run" / "adapters" / "round-0001"
    assert sorted(p.name for p in early.iterdir()) == ["client_0000", "client_0001", "client_0002", "server"]
    out = tmp_path / "out"
    assert main(["adapters", str(tmp_path / "run"), "-o", str(out), "--merged", "--exact"]) == 0
    run = open_run(tmp_path / "run", "")
    x = {n: t[:4] for n, t in run.federation.clients[0].train.x.items()}
    model = run.federation.architectures["language"]
    server = run.local_model(run.federation.infos[0]).server
    assert server is not None
    expected = {"server": server} | {
        f"client_{i.id:04d}": run.personal_params(i) for i in run.federation.infos
    }
    for name, params in expected.items():
        with torch.no_grad():
            live = model.apply(params, x)
            plain = AutoModelForCausalLM.from_pretrained(llama)
            torch.testing.assert_close(
                PeftModel.from_pretrained(plain, out / name)(**x).logits, live, rtol=0, atol=1e-5
            )
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out / "server_merged")(**x).logits
        torch.testing.assert_close(merged, model.apply(server, x), rtol=0, atol=1e-5)
    ranks = {n: json.loads((out / n / "adapter_config.json").read_text())["r"] for n in expected}
    assert [ranks[f"client_{i:04d}"] for i in range(3)] == [4, 2, 1]
    told = json.loads((early / "client_0001" / "fedlowrank.json").read_text())
    assert (told["round"], told["client"]) == (1, 1)


@pytest.mark.full
def test_a_killed_run_ends_as_an_unbroken_one(llama: Path, tmp_path: Path) -> None:
    # a fifth of the replies never arrive, as from clients that die in mid-round
    settings = {"rounds": 6, "lost_replies": 0.2, "evaluate_every": 10}
    file = write_toml(
        make_causal_tables(llama, tmp_path, run=settings, defaults={"epochs": 2}), tmp_path / "e.toml"
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", str(file), "-o", str(whole)]) == 0
    command = [sys.executable, "-m", "fedlowrank.cli.main", "run", str(file), "-o", str(broken)]
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 200
        while not (broken / RECORDS_FILE).exists() or len(read_lines(broken)) < 3:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < end, "the run is too slow to be killed in time"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert checkpoint.load(broken / "checkpoint").round < 6
    assert main(["resume", str(broken)]) == 0
    ends = [checkpoint.load(folder / "checkpoint") for folder in (whole, broken)]
    assert tree.equal(ends[0].server, ends[1].server)
    records = [[r.untimed() for r in RunRecord.load(folder).rounds] for folder in (whole, broken)]
    assert records[0] == records[1]
    assert any(r["lost"] for r in records[0])


@pytest.mark.full
def test_recomputed_activations_give_the_same_model(llama: Path, tmp_path: Path) -> None:
    plain = run_rounds(make_causal_tables(llama, tmp_path))
    again = run_rounds(make_causal_tables(llama, tmp_path, language={"gradient_checkpointing": True}))
    assert any(getattr(m, "gradient_checkpointing", False) for m in language_of_run(again).model.modules())
    for (path, a), (_, b) in zip(
        tree.leaves(plain.state.server), tree.leaves(again.state.server), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=path)


@pytest.mark.full
def test_autocast_multiplies_in_half_precision_and_learns_alike(llama: Path, tmp_path: Path) -> None:
    plain = run_rounds(make_causal_tables(llama, tmp_path))
    half = run_rounds(make_causal_tables(llama, tmp_path, language={"autocast": "bfloat16"}))
    x = {n: t[:4] for n, t in plain.federation.clients[0].train.x.items()}
    a, b = (
        r.federation.architectures["language"].apply(r.personal_params(r.federation.infos[0]), x)
        for r in (plain, half)
    )
    assert b.dtype == torch.float32
    assert 0 < float((a - b).abs().max()) < 0.1 * float(a.abs().max())


@pytest.mark.full
def test_scores_are_of_the_model_that_is_named(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, run={"rounds": 3}))
    task = PerplexityTask(str(tmp_path / "train.jsonl"), text="response", instruction="prompt", end=True)
    actual = scores(run, task, ["base", "server", "0"])
    assert actual["server"].value < actual["base"].value
    # the base again: nothing of the adapters stays in the model
    assert scores(run, task, ["base"])["base"].value == actual["base"].value
    # mean loss of a token over the same texts, from the federation's own evaluation
    examples = [c.train for c in run.federation.clients]
    assert sum(int((e.y[:, 1:] >= 0).sum()) for e in examples) <= actual["base"].count


@pytest.mark.full
def test_the_best_round_is_kept(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(
        llama,
        tmp_path,
        run={"rounds": 4, "keep_best": True},
        split={"kind": "local", "train": 0.6, "val": 0.3},
    )
    # a rate at which the last rounds are worse than an earlier one
    tables["defaults"]["optimizer"]["lr"] = 0.6
    file = write_toml(tables, tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    rounds = RunRecord.load(tmp_path / "run").rounds
    best = max(rounds, key=lambda r: (r.validation(), -r.round)).round
    assert open_run(tmp_path / "run", "", best=True).round == best
    assert open_run(tmp_path / "run", "").round == 4


@pytest.mark.full
def test_the_paper_s_scores_stand_in_the_report(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlowrank.report.formats.page.draw_all", lambda groups, styles: [])
    paper = {"label": "Table IV", "metric": "Rouge-L, in percent", "score": {"fedhl": 32.65, "flora": 32.28}}
    file = write_toml(
        make_causal_tables(llama, tmp_path, run={"rounds": 1}, reference=paper), tmp_path / "e.toml"
    )
    assert main(["compare", str(file), "-o", str(tmp_path / "runs")]) == 0
    text = (tmp_path / "runs" / "report.md").read_text()
    assert "Table IV (Rouge-L, in percent: fedhl 32.65, flora 32.28" in text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": ({"lora": {"target_modules": ["qproj"]}}, "q_proj"),
    "more ranks than clients": ({"lora": {"ranks": [1, 2, 3, 4]}}, "3 clients"),
    "a rank of 0": ({"lora": {"ranks": [0]}}, "at least 1"),
    "dora": ({"lora": {"use_dora": True}}, "use_dora"),
    "no such field": ({"lora": {"rank": 4}}, "rank"),
    "unequal ranks": ({"method": "fedit"}, "client 1"),
    "no such base": ({"language": {"path": "/nowhere/at/all"}}, "nowhere"),
    "class labels": ({"language": {"task": "classification"}}, "class"),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said(case: str, llama: Path, tmp_path: Path) -> None:
    wrong, said = WRONG[case]
    with pytest.raises(FedlowrankError, match=said):
        run_rounds(make_causal_tables(llama, tmp_path, **wrong), 0)


def test_texts_need_a_language_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[language\]"):
        ExperimentConfig.parse({"data": {"source": "dolly", "path": "x"}})


@pytest.mark.full
def test_other_runs_have_no_adapter_folders(tmp_path: Path) -> None:
    made = ExperimentConfig.parse(
        {"name": "d", "method": "fedavg", "model": {"names": ["mlp"]}, "run": {"rounds": 1}}
    )
    run = Run(made.build_method("fedavg"), made.federation(), made.run, Sequential())
    with pytest.raises(TaskError, match="no language models"):
        language_of_run(run)
