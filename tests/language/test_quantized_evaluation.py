"""8-bit layers compute in evaluations what they compute in training, so the loss of DPO begins at log 2."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from tests.language.text_experiments import make_preference_tables, run_rounds

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def steep(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose norms give some columns large values, which rounding to 8 bits changes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(llama)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[::4] *= 5
        if "_proj" in name:
            parameter.data *= 10
    folder = tmp_path_factory.mktemp("steep")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def test_the_first_loss_of_dpo_on_an_8bit_base_is_log_2(steep: Path, tmp_path: Path) -> None:
    tables = make_preference_tables(steep, tmp_path, {"kind": "dpo", "beta": 1.0})
    tables["language"]["quantize"] = "8bit"
    tables["defaults"]["optimizer"]["lr"] = 1e-9
    losses = run_rounds(tables, steps=0).step().training_losses
    assert losses == {"local": pytest.approx(math.log(2), abs=1e-5)}


def test_8bit_layers_compute_the_same_in_training_and_evaluation(steep: Path) -> None:
    model: Any = load_base(LanguageBase(str(steep), quantize="8bit"), (), Key((0,))).model
    ids = torch.arange(4, 20)[None]
    for each in (model, copy.deepcopy(model)):
        with torch.no_grad():
            scores = [each.train(mode)(input_ids=ids).logits for mode in (False, True, False)]
        assert scores[0].abs().max() > 0.1
        for other in scores[1:]:
            assert torch.equal(scores[0], other)
    # a product with the weights as they were stored
    layer = model.eval().model.layers[0].mlp.up_proj
    x = 20 * torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = x @ (layer.weight.data.float() * layer.state.SCB[:, None] / 127).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
