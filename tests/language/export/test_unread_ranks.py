"""A method that is not for LoRA trains the model's own rank: nothing states or writes the ranks that clients were given."""

import json
from pathlib import Path

import pytest
import safetensors.torch

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.results.records import RunRecord
from tests.language.text_experiments import make_causal_tables, write_toml


@pytest.mark.parametrize(
    ("method", "ranks"), [("fedavg", [4, 4, 4]), ("fedit", [2, 2, 2]), ("fedhl", [3, 2, 1])]
)
def test_cards_and_tables_state_the_ranks_that_were_trained(
    method: str, ranks: list[int], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = make_causal_tables(llama, tmp_path, method=method, lora={"ranks": [3, 2, 1]})
    if method == "fedit":
        tables["methods"] = {"fedit": {"training": {"common_rank": 2}}}
    file, run = write_toml(tables, tmp_path / "made.toml"), tmp_path / "run"
    assert main(["run", str(file), "-o", str(run)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("does not read the ranks of clients" in printed) == (method == "fedavg")
    assert ("by rank of the client" in printed) == (method == "fedhl")
    assert list(RunRecord.load(run).ranks.values()) == ([] if method == "fedavg" else ranks)
    assert main(["adapters", str(run), "-o", str(tmp_path / "out")]) == 0
    sizes = [info.example_count for info in ExperimentConfig.parse(tables).federation().infos]
    card = (tmp_path / "out" / "client_0002" / "README.md").read_text()
    for i, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        assert f"| {i} | {size} | {rank} |" in card
    folder = tmp_path / "out" / "client_0002"
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == ranks[2]
    assert {len(t) for name, t in tensors.items() if "lora_A" in name} == {ranks[2]}
    assert "The relative error is 0." in card
