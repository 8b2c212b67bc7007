"""A base that bitsandbytes quantizes trains as one with the same weights, dense; gradients that do not pass are refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.quantized_layers import keep_gradients, make_quantization
from fedlowrank.training.flops import FlopCounter
from tests.language.text_experiments import make_causal_tables, run_rounds

KEY = Key((0,))
OF_UNEQUAL_RANKS = ["fedhl", "hetlora", "flexlora", "flora"]
OF_ONE_RANK = ["fedit", "ffa_lora", "fedsa_lora", "fedex_lora"]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def dense(llama: Path, tmp_path_factory: pytest.TempPathFactory, library: Any) -> Path:
    """A folder with the weights of the 4-bit base, dense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized: Any = load_base(LanguageBase(str(llama), quantize="4bit", dtype="float32"), (), KEY).model
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    count = 0
    for name, layer in quantized.named_modules():
        if isinstance(layer, library.nn.Linear4bit):
            weight = library.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
            model.get_submodule(name).weight.data.copy_(weight)
            count += 1
    assert count == 14  # seven linear layers in each of two blocks
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("method", OF_UNEQUAL_RANKS + OF_ONE_RANK)
def test_training_on_a_4bit_base_is_that_on_its_weights_made_dense(
    method: str, llama: Path, dense: Path, tmp_path: Path
) -> None:
    # every round is evaluated, so layers compute without gradients before they train again
    lora = {"target_modules": "all-linear", "ranks": [4] if method in OF_ONE_RANK else [4, 2, 1]}
    tables = make_causal_tables(llama, tmp_path, method=method, language={"dtype": "float32"}, lora=lora)
    if method in ("flora", "fedex_lora"):
        tables["methods"] = {method: {"base_updates": "stacked"}}
    tables["defaults"]["optimizer"] = {"kind": "sgd", "lr": 0.5}
    runs, records = [], []
    for language in ({"path": str(llama), "quantize": "4bit"}, {"path": str(dense)}):
        runs.append(run_rounds(tables | {"language": tables["language"] | language}, steps=2))
        records.append(runs[-1].step())
    actual, expected = (
        dict(tree.leaves((r.state.server, [r.state.clients[i] for i in range(3)]))) for r in runs
    )
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        torch.testing.assert_close(actual[path], value, rtol=1e-3, atol=1e-5, msg=str(path))
    assert max(float(v.abs().max()) for v in expected.values() if v.numel()) > 0.01
    assert records[0].flops == records[1].flops > 0
    for a, b in zip(*(r.measured.columns for r in records), strict=True):
        assert (a.name, a.series, a.split) == (b.name, b.series, b.split)
        if a.name == "loss":
            assert a.values == pytest.approx(b.values, rel=1e-4)


@pytest.mark.parametrize("method", ["flora", "fedex_lora"])
def test_updates_cannot_be_merged_into_a_quantized_base(
    method: str, llama: Path, tmp_path: Path, library: Any
) -> None:
    for quantize in ("4bit", "8bit"):
        tables = make_causal_tables(llama, tmp_path, method=method, lora={"ranks": [4]})
        tables["language"]["quantize"] = quantize
        with pytest.raises(TaskError, match=r"q_proj.*which is quantized.*base_updates = 'stacked'"):
            run_rounds(tables, steps=1)


def test_training_on_an_8bit_base_is_close_to_that_on_the_dense_base(
    llama: Path, tmp_path: Path, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lora = {"target_modules": "all-linear", "ranks": [4]}
    tables = make_causal_tables(llama, tmp_path, method="fedit", language={"dtype": "float32"}, lora=lora)
    losses = []
    for quantize in ("8bit", None):
        tables["language"]["quantize"] = quantize
        losses.append(run_rounds(tables, steps=2).step().training_losses)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("bitsandbytes")]
    assert len(texts) == len(set(texts))


def test_the_products_of_quantized_layers_are_counted(library: Any) -> None:
    x = torch.randn(5, 64)
    layer = library.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer = layer.to("cpu").requires_grad_(False)
    for is_learning in (False, True):
        with FlopCounter() as counter:
            layer(x.requires_grad_(is_learning))
        assert counter.total == 2 * 5 * 64 * 96
    a, b = (torch.ones(rows, 64, dtype=torch.int8) for rows in (5, 96))
    with FlopCounter() as counter:
        torch.ops.bitsandbytes.int8_linear_matmul(a, b)
        torch.ops.bitsandbytes.int8_scaled_mm(a, b, torch.ones(5), torch.ones(96))
    assert counter.total == 2 * (2 * 5 * 64 * 96)


class Rounding(torch.autograd.Function):
    """A product with a weight, and ``factor`` times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.saved = weight, factor
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, factor = ctx.saved
        return factor * gradients[0] @ weight, None, None


class Quantized(nn.Module):
    """A layer of bitsandbytes by its module, whose gradient is ``factor`` times the right one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.in_features, self.factor = 6, factor
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), False)
        self.bias = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Rounding.apply(x, self.weight, self.factor)
        return product + self.bias


def test_a_layer_without_its_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantized, "__module__", "bitsandbytes.nn.modules")
    keep_gradients(nn.Sequential(nn.Linear(3, 3), Quantized(1.0)))
    keep_gradients(nn.Sequential(Quantized(1.01)))
    for factor in (0.0, -1.0, 2.0):
        with pytest.raises(ConfigError, match=r"no gradient passes .* '0' \(Quantized of bitsandbytes\)"):
            keep_gradients(nn.Sequential(Quantized(factor)))
    monkeypatch.setattr(Quantized, "forward", lambda self, x: x.detach() @ self.weight.T)
    with pytest.raises(ConfigError, match="Leave out quantize"):
        keep_gradients(nn.Sequential(Quantized(1.0)))


def test_a_message_of_each_call_is_written_once(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    make_quantization(transformers, "8bit", torch.float32)
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    for text in ("inputs will be cast", "another", "inputs will be cast"):
        logger.warning(text)
    assert [r.getMessage() for r in caplog.records] == ["inputs will be cast", "another"]
