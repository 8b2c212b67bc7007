"""Texts over a network: pairs of unequal lengths, the reference of DPO, and the format for which rows call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.key import Key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.network.client import ClientRuntime, prepare, read_own_share
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from tests.support.byte_tokenizers import TEMPLATES
from tests.support.local_network import LocalTransport, intact, log_lines, serve_run

CASES = {
    "dpo": ("causal", ("prompt", "chosen", "rejected"), "pair_accuracy"),
    "orpo": ("causal", ("prompt", "chosen", "rejected"), "pair_accuracy"),
    "contrastive": ("embedding", ("anchor", "positive"), "retrieval_accuracy"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", CASES)
def test_a_network_is_the_simulation(loss: str, tmp_path: Path) -> None:
    task, names, metric = CASES[loss]
    base = build_tiny_model(tmp_path / "base", "causal", Key((0,)), ["the fox jumps over the dog"])
    files = []
    for site, words in enumerate((1, 12)):
        values = [("who? " * (i % 3 + 1), "the fox " * words, f"a dog {i}") for i in range(20)]
        rows = [dict(zip(names, row, strict=False)) for row in values]
        files.append(tmp_path / f"site{site}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: dict[str, Any] = {
        "name": "pairs",
        "method": "fedhl",
        "language": {"path": str(base), "format": "plain", "context": 64, "task": task},
        "data": {
            "source": "text",
            "path": list(map(str, files)),
            "client_by_file": True,
            "normalize": "none",
        },
        "partition": {"kind": "natural"},
        "loss": {"kind": loss},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "ranks": [4, 2]},
        "run": {"rounds": 2, "representations": 0},
        "defaults": {"batch_size": 8, "optimizer": {"kind": "adamw", "lr": 0.01}},
        "network": {"clients": 2, "min_clients": 2, "wait": 5.0, "limits": {"update_ratio": 0.0}},
    }
    made = ExperimentConfig.parse(tables)
    # what each site reads from its own file is as long as its own texts
    alone = ExperimentConfig.parse(
        {**tables, "data": {"source": "text", "path": str(files[0]), "normalize": "none"}}
    )
    widths = {
        read_own_share(alone, i, 2, file).data[i].train.x["input_ids"].shape[-1]
        for i, file in enumerate(files)
    }  # type: ignore[call-overload,index]
    assert len(widths) == 2
    folders = {}
    for i, file in enumerate(files):
        folders[100 + i] = tmp_path / f"client-{i}"
        prepare(folders[100 + i], alone, i, read_own_share(alone, i, 2, file), SiteSettings.simulated())
    unequal = serve_run(LocalTransport(folders, intact), alone, tmp_path / "unequal")
    assert [r.lost for r in unequal.rounds] == [{}, {}, {}]
    folders, shares = {}, made.shares()
    for i in range(2):
        folders[200 + i] = tmp_path / f"same-{i}"
        prepare(folders[200 + i], made, i, shares, SiteSettings.simulated())
    result = serve_run(LocalTransport(folders, intact), made, tmp_path / "run")
    run = Run(made.build_method("fedhl"), made.federation(), made.run, Sequential())
    run.record_initial_models()
    records = [run.step() for _ in range(2)]
    for record, same in zip(records, result.rounds[1:], strict=True):
        for name in ("loss", metric):
            assert same.by_client(name, split="test") == pytest.approx(
                record.by_client(name, split="test"), rel=1e-4
            )


ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the fox"}]},
    "verbatim": {"prompt": "who? ", "completion": "the fox"},
}


def test_server_and_clients_know_the_format_for_which_the_rows_call(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", "causal", Key((0,)), ["the fox jumps over the dog"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    tokenizer.save_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(base)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for kind, row in ROWS.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join([json.dumps(row) + "\n"] * 10))

    def make(kind: str) -> ExperimentConfig:
        return ExperimentConfig.parse(
            {
                "method": "fedit",
                "language": {"path": str(base), "context": 96},
                "data": {"source": "text", "path": str(tmp_path / f"{kind}.jsonl"), "normalize": "none"},
                "partition": {"kind": "iid", "clients": 3},
                "lora": {"r": 2, "target_modules": ["q_proj"]},
                "run": {"rounds": 1, "representations": 0},
                "network": {"min_clients": 2, "wait": 5.0},
            }
        )

    def prepare_sites(name: str, kinds: tuple[str, ...]) -> dict[int, Path]:
        folders = {100 + i: tmp_path / name / str(i) for i in range(3)}
        for i, kind in enumerate(kinds):
            share = read_own_share(make(kind), i, 3, tmp_path / f"{kind}.jsonl")
            # the sites' files lie at different paths, which an experiment does not compare
            prepare(folders[100 + i], make(kinds[0]), i, share, SiteSettings.simulated())
        return folders

    folders = prepare_sites("same", ("chat",) * 3)
    result = serve_run(LocalTransport(folders, intact), make("chat"), tmp_path / "run-same")
    assert result.run is not None
    for language in (result.run.federation.companion, ClientRuntime(folders[100]).language):
        assert language.uses_chat_template
        assert set(language.loaded.model.generation_config.eos_token_id) == ends
    (stored,) = folders[100].glob("*/model/adapter/fedlowrank.json")
    assert json.loads(stored.read_text())["prompt_format"] == "chat"
    # sites whose rows call for different formats do not learn one prompt
    folders = prepare_sites("other", ("verbatim", "verbatim", "chat"))
    with log_lines() as lines:
        result = serve_run(LocalTransport(folders, intact), make("verbatim"), tmp_path / "run-other")
    assert any(
        "client 2 writes prompts in the format 'chat' and the other clients in 'verbatim'" in line
        and "Set language.format" in line
        for line in lines
    )
    assert result.run is not None
    assert result.run.federation.companion.prompt_template == "{instruction}"
