"""Files of deployed models, their size, and the time of a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedlowrank.adapters.deployment import (
    Size,
    compare_latency,
    deploy,
    load_deployed,
    measure_size,
    save_deployed,
)
from fedlowrank.core.errors import CheckpointError, ConfigError, TaskError
from fedlowrank.models.zoo import ModelSettings
from tests.adapters.deployed_models import IMAGE, LAYOUTS, compressed, mixture, odd, zoo

torch.set_num_threads(1)


def data_in(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by the last part of their names; a safetensors file holds nothing else after its
    header."""
    with safetensors.safe_open(path, "pt") as file:
        actual = {n.rsplit("/", 1)[1]: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    whole, header = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
    assert sum(t.nbytes for t in actual.values()) == whole - 8 - header
    return actual


@pytest.mark.parametrize(
    ("count", "form"),
    # of 12,000 places: 1500 bytes as bits; 4 · (count + 31) as indices
    [
        (344, {"indices", "starts"}),
        (345, {"mask"}),
        (11700, None),
    ],
)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(400, 30, bias=False), lambda: nn.Conv2d(16, 30, 5, bias=False)]
)
def test_places_are_written_as_indices_or_as_bits_whichever_is_smaller(
    make, count, form, tmp_path: Path
) -> None:
    layer, w = make(), torch.zeros(12000)
    at = torch.randperm(12000, generator=torch.Generator().manual_seed(0))[:count]
    w[at] = torch.randn(count, generator=torch.Generator().manual_seed(1))
    w = w.view(layer.weight.shape)
    made = deploy(layer, {"weight": w})
    save_deployed(made, tmp_path / "model")
    held = data_in(tmp_path / "model")
    assert measure_size(made).nbytes == sum(t.nbytes for t in held.values())
    if form is None:
        assert {*held} == {"weight"}
        return
    assert {*held} == {"left", "right", "values"} | form
    if form == {"mask"}:
        mask = np.unpackbits(held["mask"].numpy(), count=12000).astype(bool).reshape(w.shape)
        actual = np.zeros(w.shape, np.float32)
        actual[mask] = held["values"].numpy()
        np.testing.assert_array_equal(actual, w.numpy())
    back = load_deployed(layer, tmp_path / "model")
    assert torch.equal(back.weight, w)
    assert measure_size(back) == measure_size(made)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cnn", "resnet18_w16"])
def test_a_file_brings_back_the_same_bits(name, layout, tmp_path: Path) -> None:
    module = zoo(name)
    weights, sparse = mixture(module, 0.3, 0.02)
    made, x = deploy(module, weights, sparse, layout), torch.randn(3, *IMAGE)
    save_deployed(made, tmp_path / "model.safetensors")
    state = torch.get_rng_state()
    for start in (module, lambda: ModelSettings((name,)).factories(IMAGE, 10)[name]()):
        back = load_deployed(start, tmp_path / "model.safetensors")
        assert torch.equal(back(x), made(x))
        assert {n: type(m) for n, m in back.named_modules()} == {n: type(m) for n, m in made.named_modules()}
        assert measure_size(back) == measure_size(made)
        assert not back.training
        assert not any(p.requires_grad for p in back.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not compressed(module)
    assert module.training
    size = (tmp_path / "model.safetensors").stat().st_size
    held = measure_size(made).nbytes
    assert held < size < held + 25_000
    if layout == "small":
        assert size < 0.6 * measure_size(module).nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_odd_models_and_other_types_come_back(dtype, tmp_path: Path) -> None:
    module = odd().to(dtype)
    made, x = deploy(module, *mixture(module, 0.4, 0.01)), torch.arange(30).view(3, 10)
    made.shift.fill_(0.5)
    save_deployed(made, tmp_path / "model")
    back = load_deployed(odd(1), tmp_path / "model")
    assert torch.equal(back(x), made(x))
    assert back.head.weight is back.embedding.weight
    assert back(x).dtype == dtype


def test_a_deployed_model_is_a_module_as_any(tmp_path: Path) -> None:
    module, x = zoo("cnn"), torch.randn(3, *IMAGE)
    made = deploy(module, *mixture(module, 0.3, 0.02))
    expected, state = made(x), made.state_dict()
    other = copy.deepcopy(made)
    for t in other.state_dict().values():
        t.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)
    torch.testing.assert_close(other.double()(x.double()).float(), expected, rtol=1e-4, atol=1e-4)
    assert {t.dtype for t in other.buffers()} == {torch.int32}
    # safetensors takes its state, as it takes any
    safetensors.torch.save_file(state, tmp_path / "state")
    made.load_state_dict(safetensors.torch.load_file(tmp_path / "state"))
    assert torch.equal(made(x), expected)


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    layer = nn.Linear(30, 20)
    save_deployed(deploy(layer, *mixture(layer, 0.4, 0.01)), tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    other = safetensors.torch.save({"weight": torch.zeros(3)})
    flipped = [bytes([*data[:i], data[i] ^ 8, *data[i + 1 :]]) for i in range(0, len(data), 97)]
    cut = [data[:i] for i in (0, 7, 8, 100, len(data) // 2, len(data) - 1)]
    for bad in (*flipped, *cut, other, b"nonsense" * 9):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(CheckpointError, match="bad"):
            load_deployed(layer, tmp_path / "bad")
    with pytest.raises(CheckpointError, match=r"cannot read.*missing"):
        load_deployed(layer, tmp_path / "missing")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_deployed(layer, tmp_path / "no" / "folder")


def test_a_file_of_a_later_format_is_refused(tmp_path: Path, monkeypatch) -> None:
    layer = nn.Linear(30, 20)
    with monkeypatch.context() as patch:
        patch.setattr("fedlowrank.adapters.deployment.FORMAT", "fedlowrank.deployed.3")
        save_deployed(layer, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"not of the format fedlowrank\.deployed\.2"):
        load_deployed(layer, tmp_path / "model")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(30, 21), nn.LayerNorm(20)), "no plain layer '0'"),
        (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(20)), "no plain layer '0'"),
        (lambda: nn.Sequential(nn.Linear(30, 20)), "1.bias is .20. in the file and missing"),
        (lambda: nn.Sequential(nn.Linear(30, 20, bias=False), nn.LayerNorm(20)), "0.bias"),
        (lambda: nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(19)), "1.bias is .20. in the file and .19."),
        (lambda: nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.PReLU()), "2.weight is missing"),
        (nn.Sequential, "no plain layer '0'"),
    ],
)
def test_a_file_of_another_architecture_is_refused(make, message, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20))
    save_deployed(deploy(module, *mixture(module, 0.4, 0.01)), tmp_path / "model")
    with pytest.raises(TaskError, match=message):
        load_deployed(make, tmp_path / "model")


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(TaskError, match="_extra_state"):
        save_deployed(Stateful(3, 3), tmp_path / "model")


def test_size_of_any_module() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    nn.init.zeros_(module[0].bias)
    # 9 + 3 + 3 + 6 numbers, of which 3 biases and the 3 of the norm are zero; running mean, variance and an int64 count
    assert measure_size(module) == Size(21, 21 - 6, 21 * 4 + 6 * 4 + 8)


class Logged(nn.Module):
    def __init__(self, log: list[str], name: str, turns: int) -> None:
        super().__init__()
        self.log, self.name, self.turns = log, name, turns

    def forward(self, x: Tensor) -> Tensor:
        # not in inference mode, in which no forward can differentiate
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 1
        self.log.append(self.name)
        for _ in range(self.turns):
            x = x @ x
        return x


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_arms_take_turns() -> None:
    log: list[str] = []
    arms = {n: Logged(log, n, k) for n, k in (("a", 1), ("b", 40))}
    actual = compare_latency(arms, torch.eye(150), 5)
    assert torch.get_num_threads() == 2
    assert log == ["a", "b"] * 7
    for t in actual.values():
        assert 0 <= t.lower <= t.median <= t.upper
    assert actual["b"].median > 5 * actual["a"].median
    log.clear()
    one = compare_latency({"a": arms["a"]}, {"x": torch.eye(3)}, 1)["a"]
    assert log == ["a"] * 3
    assert one.lower == one.median == one.upper
    with pytest.raises(ConfigError, match="repeats"):
        compare_latency(arms, torch.eye(3), 0)
    # threads are given back after an error, too
    with pytest.raises(RuntimeError):
        compare_latency({"": nn.Linear(3, 3)}, torch.ones(4))
    assert torch.get_num_threads() == 2
