"""A quantized encoder classifies: its head is in float32 and trains, and parts without weights are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from tests.language.text_experiments import make_causal_tables, run_rounds

CLASSES = ("a", "b")
KEY = Key((3,))

pytest.importorskip("bitsandbytes")


def make_class_tables(base: Path, folder: Path, **language: Any) -> dict[str, Any]:
    rows = [{"text": f"the {('fox', 'dog')[i % 2]} is {i % 5}", "label": CLASSES[i % 2]} for i in range(40)]
    (folder / "classes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lora = {"target_modules": ["query", "value"], "ranks": [4]}
    tables = make_causal_tables(base, folder, method="fedit", lora=lora)
    tables["data"] = {"source": "text_classes", "path": str(folder / "classes.jsonl"), "normalize": "none"}
    tables["partition"] = {"kind": "iid", "clients": 2}
    tables["language"] = {"path": str(base), "task": "classification", **language}
    return tables


def save_with_dequantized_weights(bert: Path, quantize: Any, folder: Path) -> Path:
    """A folder with the body that the quantized base computes with, dense."""
    import bitsandbytes
    from transformers import AutoModel, AutoTokenizer

    quantized: Any = load_base(
        LanguageBase(str(bert), "classification", quantize=quantize), CLASSES, KEY
    ).model
    model = AutoModel.from_pretrained(bert)
    count = 0
    for name, layer in quantized.bert.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
        elif isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            # the scale moves at the first call
            scale = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
            weight = layer.weight.data.float() * scale[:, None] / 127
        else:
            continue
        model.get_submodule(name).weight.data.copy_(weight)
        count += 1
    assert count == 13  # six linear layers in each of two blocks, and the pooler
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_quantized_classifier_trains_as_one_with_the_same_weights_dense(
    quantize: str, bert: Path, tmp_path: Path
) -> None:
    dense = save_with_dequantized_weights(bert, quantize, tmp_path / "dense")
    losses = []
    for base, language in ((bert, {"quantize": quantize}), (dense, {})):
        run = run_rounds(make_class_tables(base, tmp_path, **language), steps=0)
        losses.append([run.step().training_losses for _ in range(2)])
    for actual, expected in zip(*losses, strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("task", ["classification", "token_classification"])
def test_the_head_of_a_quantized_base_is_not_quantized(task: Any, bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    dense = load_base(LanguageBase(str(bert), task), CLASSES, KEY)
    # a head in the files
    dense.model.save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "whole")
    for quantize in ("4bit", "8bit"):
        for folder in (bert, tmp_path / "whole"):
            loaded = load_base(LanguageBase(str(folder), task, quantize=quantize), CLASSES, KEY)
            assert loaded.head == ("classifier",)
            head = loaded.model.classifier
            assert type(head) is torch.nn.Linear
            assert head.weight.dtype == torch.float32
            if folder != bert:
                assert torch.equal(head.weight, dense.model.classifier.weight)
            query = loaded.model.bert.encoder.layer[0].attention.self.query
            assert type(query).__module__.startswith("bitsandbytes.")


def test_a_quantized_body_without_its_weights_is_refused(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    for quantize in ("4bit", "8bit"):
        with pytest.raises(ConfigError, match=r"'bert.pooler.dense'.* Leave out quantize"):
            load_base(LanguageBase(str(tmp_path), "classification", quantize=quantize), CLASSES, KEY)
        # hidden states do not depend on the pooler
        model = load_base(LanguageBase(str(tmp_path), "embedding", quantize=quantize), (), KEY).model
        ids = torch.arange(4, 12)[None]
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
