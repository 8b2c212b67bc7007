"""What is made of a run on a quantized base: parameter counts, state dicts, merged models, and clear refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import simulate
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import FedlowrankError, TaskError
from fedlowrank.results.records import RunRecord
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

pytest.importorskip("bitsandbytes")

KINDS = ["4bit", "8bit"]


def make_tables(base: Path, folder: Path, quantize: str | None, method: str = "fedit") -> dict[str, Any]:
    tables = make_causal_tables(
        base, folder, method=method, lora={"target_modules": "all-linear", "ranks": [4]}, run={"rounds": 1}
    )
    tables["language"] |= {"quantize": quantize, "dtype": "float32"}
    return tables


def run_in_memory(tables: dict[str, Any]) -> Any:
    made = ExperimentConfig.parse(tables)
    return simulate(made.build_method(made.default_method), made.federation(), rounds=1)


def test_parameters_are_those_before_packing(llama: Path, tmp_path: Path) -> None:
    counts = []
    for quantize in (None, *KINDS):
        federation = ExperimentConfig.parse(make_tables(llama, tmp_path, quantize)).federation()
        counts.append(federation.architectures["language"].parameter_count)
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("quantize", KINDS)
def test_a_client_s_state_loads_into_its_module(quantize: str, llama: Path, tmp_path: Path) -> None:
    result = run_in_memory(make_tables(llama, tmp_path, quantize))
    module = result.run.federation.architectures["language"].module
    ids = torch.tensor([[1, 5, 9]])
    params = result.run.personal_params(result.run.federation.infos[1])
    with result.run.federation.companion.use_parameters(params) as model, torch.no_grad():
        expected = model(input_ids=ids).logits
    with torch.no_grad():
        before = module(input_ids=ids).logits
    module.load_state_dict(result.personal(client=1))
    with torch.no_grad():
        actual = module(input_ids=ids).logits
    torch.testing.assert_close(actual, expected)
    assert (before - actual).abs().max() > 1e-4
    with pytest.raises(FedlowrankError, match="quantized, so they cannot be exported; write adapters"):
        result.deploy(client=1)


@pytest.mark.parametrize("quantize", KINDS)
def test_adapters_are_merged_into_the_base_loaded_dense_and_runs_resume_in_another_precision(
    quantize: str, llama: Path, tmp_path: Path
) -> None:
    import peft
    import transformers

    file = write_toml(make_tables(llama, tmp_path, quantize), tmp_path / "made.toml")
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["run", str(file), "-o", str(run)]) == 0
    assert main(["adapters", str(run), "-o", str(out), "--merged"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    whole = transformers.AutoModelForCausalLM.from_pretrained(out / "server_merged", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        logits = whole(input_ids=ids).logits
        assert (logits - base(input_ids=ids).logits).abs().max() > 1e-4
        adapted = peft.PeftModel.from_pretrained(base, out / "server")
        torch.testing.assert_close(logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert main(["resume", str(run), "run.rounds=2", "local.quantize=none"]) == 0
    assert RunRecord.load(run).rounds[-1].round == 2


def test_methods_that_draw_several_models_are_refused(llama: Path, tmp_path: Path) -> None:
    tables = make_tables(llama, tmp_path, "4bit", "ifca")
    with pytest.raises(TaskError, match="weights of this one are quantized"):
        run_rounds(tables)


def test_the_whole_update_of_a_higher_rank_has_no_state_dict(llama: Path, tmp_path: Path) -> None:
    tables = make_tables(llama, tmp_path, "4bit", "flora")
    tables["methods"] = {"flora": {"base_updates": "stacked"}}
    result = run_in_memory(tables)
    with pytest.raises(TaskError, match=r"above the rank 4 of the module's factors.*fedlowrank adapters"):
        result.personal(client=0)
