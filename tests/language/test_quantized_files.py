"""Files that are quantized already say so, quantized layers are not loaded for each call, and ``auto`` has a dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.language import base_model
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.quantized_layers import find_stored_quantization
from tests.language.text_experiments import make_causal_tables, run_rounds

KEY = Key((0,))

pytest.importorskip("bitsandbytes")


def save_quantized(base: Path, quantize: Any, folder: Path) -> Path:
    from transformers import AutoTokenizer

    load_base(LanguageBase(str(base), quantize=quantize, dtype="bfloat16"), (), KEY).model.save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "other"), [("4bit", "8bit"), ("8bit", "4bit")])
def test_files_that_are_quantized_already_keep_their_quantization(
    kind: Any, other: Any, llama: Path, tmp_path: Path
) -> None:
    folder = save_quantized(llama, kind, tmp_path / "quantized")
    with pytest.raises(
        ConfigError, match=f"quantize is '{other}'.*quantized already .{kind}.*Leave quantize out"
    ):
        load_base(LanguageBase(str(folder), quantize=other), (), KEY)
    for asked in (kind, None):
        loaded = load_base(LanguageBase(str(folder), quantize=asked), (), KEY)
        note = next(n for n in loaded.notes if n.startswith("The files hold quantized weights"))
        assert kind in note
        assert ("compute in bfloat16" in note) == (kind == "4bit")
        layers = [m for m in loaded.model.modules() if type(m).__module__.startswith("bitsandbytes.")]
        assert len(layers) == 14
        assert {type(m).__name__ for m in layers} == {{"4bit": "Linear4bit", "8bit": "Linear8bitLt"}[kind]}
        assert type(loaded.model.lm_head) is torch.nn.Linear
    tables = make_causal_tables(folder, tmp_path, method="fedit", lora={"ranks": [4]})
    original = make_causal_tables(llama, tmp_path, method="fedit", lora={"ranks": [4]})
    original["language"]["quantize"] = kind
    losses = [run_rounds(t, steps=0).step().training_losses for t in (tables, original)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_classifier_on_quantized_files_has_a_head_in_float32(bert: Path, tmp_path: Path) -> None:
    for task, classes in (("embedding", ()), ("classification", ("a", "b"))):
        folder = tmp_path / task
        model = load_base(LanguageBase(str(bert), task, quantize="4bit"), classes, KEY).model  # type: ignore[arg-type]
        model.save_pretrained(folder)
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
        loaded = load_base(LanguageBase(str(folder), "classification"), ("a", "b"), KEY)
        assert type(loaded.model.classifier) is torch.nn.Linear
        if task == "classification":
            assert torch.equal(loaded.model.classifier.weight, model.classifier.weight)


def test_the_quantization_of_files_is_read_from_their_configuration() -> None:
    class Part:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    assert find_stored_quantization(Part()) is None
    assert find_stored_quantization(Part(quantization_config=None)) is None
    gptq = find_stored_quantization(
        Part(text_config=Part(quantization_config={"quant_method": "gptq", "bits": 4}))
    )
    assert gptq is not None
    assert (gptq.kind, gptq.compute_dtype, gptq.is_of_bitsandbytes) == ("gptq", None, False)


def test_quantized_layers_on_the_disk_are_refused(llama: Path, tmp_path: Path) -> None:
    names = (
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    )
    for devices in (("cpu", "disk"), ("0", "cpu"), (0, "disk"), ("disk", "disk")):
        table = dict.fromkeys(names, devices[0]) | {"model.layers.1": devices[1]}
        with pytest.raises(ConfigError, match=r"quantized layers cannot be on the disk.*Leave out quantize"):
            LanguageBase(str(llama), quantize="4bit", device_map=table)
        LanguageBase(str(llama), device_map=table)
    pytest.importorskip("accelerate")
    table = dict.fromkeys(names, "cpu")
    assert load_base(LanguageBase(str(llama), quantize="8bit", device_map=table), (), KEY).head == ()
    # accelerate chooses the disk for what does not fit
    small = {"max_memory": {"cpu": "70KB"}, "offload_folder": str(tmp_path / "offload")}
    with pytest.raises(ConfigError, match="quantized layers cannot be on the disk"):
        load_base(LanguageBase(str(llama), quantize="4bit", device_map="auto", **small), (), KEY)  # type: ignore[arg-type]
    # of files that are quantized already
    folder = save_quantized(llama, "4bit", tmp_path / "quantized")
    table["model.layers.1"] = "disk"
    with pytest.raises(ConfigError, match="quantized layers cannot be on the disk"):
        load_base(LanguageBase(str(folder), device_map=table), (), KEY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_4bit_layers_compute_in_the_dtype_of_the_files(
    dtype: torch.dtype | None, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=dtype or torch.float32)
    model.save_pretrained(tmp_path)
    if dtype is None:
        text = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(text.replace('"dtype": "float32",', ""))
        assert '"dtype"' not in (tmp_path / "config.json").read_text()
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    computed = []
    make = base_model.make_quantization

    def record(*args: Any) -> Any:
        computed.append(make(*args).bnb_4bit_compute_dtype)
        return make(*args)

    monkeypatch.setattr(base_model, "make_quantization", record)
    load_base(LanguageBase(str(tmp_path), dtype="auto", quantize="4bit"), (), KEY)
    load_base(LanguageBase(str(tmp_path), dtype="bfloat16", quantize="4bit"), (), KEY)
    assert computed == [dtype or torch.float32, torch.bfloat16]
