"""`fedlowrank chat`: replies are those that transformers generates from the exported model."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError
from fedlowrank.language.chat_session import ChatSession
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.language.scores.text_generation import Decoding
from tests.language.scores.score_models import greedy
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TURNS = ["who is 1?", "and who is 2?"]


@pytest.fixture(scope="module")
def base(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a chat template, and weights so large that what it writes depends on every token."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                if weight.dim() == 2:
                    weight *= 10
    model.save_pretrained(folder)
    shutil.copytree(llama, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stored(base: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two runs, one with a chat template, and of the adapters of the first."""
    folder = tmp_path_factory.mktemp("stored")
    for name, model, form in (("chat", base, "chat"), ("plain", llama, "plain")):
        tables = make_causal_tables(
            model, folder, language={"format": form, "context": 64}, run={"rounds": 1}
        )
        assert main(["run", str(write_toml(tables, folder / f"{name}.toml")), "-o", str(folder / name)]) == 0
    assert main(["adapters", str(folder / "chat"), "-o", str(folder / "adapters"), "--exact"]) == 0
    return folder


def by_transformers(base: Path, adapter: Path | None, prompt: str, tokens: int) -> str:
    """Greedy continuation of a prompt by PEFT and transformers alone, the special tokens being in the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for _ in range(tokens):
            new = model(input_ids=ids).logits[0, -1].argmax()
            if new == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, new[None, None]], 1)
    whole = tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole[len(prompt.removeprefix(tokenizer.bos_token)) :].strip()


@pytest.mark.few(2)
@pytest.mark.parametrize("model", ["server", "1", "base"])
def test_one_question_is_answered(
    model: str, stored: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {"server": stored / "adapters" / "server", "1": stored / "adapters" / "client_0001"}.get(model)
    command = ["chat", str(stored / "chat"), "--prompt", TURNS[0], "--tokens", "8", "--model", model]
    capsys.readouterr()
    assert main(command) == 0
    expected = by_transformers(base, adapter, f"<s>[user] {TURNS[0]}\n[assistant] ", 8)
    assert capsys.readouterr().out == expected + "\n"


def test_the_model_sees_the_whole_conversation(
    stored: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([TURNS[0], "", TURNS[1]])))
    capsys.readouterr()
    assert main(["chat", str(stored / "chat"), "--tokens", "6"]) == 0
    server, prompt, replies = stored / "adapters" / "server", "<s>", []
    for question in TURNS:
        prompt += f"[user] {question}\n"
        replies.append(by_transformers(base, server, prompt + "[assistant] ", 6))
        prompt += f"[assistant] {replies[-1]}\n"
    printed = capsys.readouterr().out
    assert "FedHL after round 1, model server" in printed
    assert printed.rstrip("\n").endswith("\n".join(replies))


def test_without_a_template_the_format_of_training_is_asked_in(
    stored: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command = ["chat", str(stored / "plain"), "--prompt", TURNS[0], "--tokens", "8", "--model", "base"]
    assert main(command) == 0
    assert capsys.readouterr().out == by_transformers(llama, None, f"<s>{TURNS[0]}\n", 8) + "\n"


def conversation(base: Path, decoding: Decoding) -> ChatSession:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    return ChatSession(model, tokenizer, str, decoding)


def test_turns_that_no_longer_fit_are_dropped_the_oldest_first(base: Path) -> None:
    """The context of the model has 256 tokens."""
    talk = conversation(base, Decoding(16, special_tokens=False))
    long = "who is it? " * 12
    for _ in range(3):
        talk.reply(long)
    assert talk.dropped_count > 0
    assert talk.dropped_count % 2 == 0
    with pytest.raises(ConfigError, match="exceed the model's context of 256 tokens"):
        talk.reply(long * 5)
    # the question that did not fit is forgotten
    assert talk.reply("who?") == by_transformers(base, None, "<s>[user] who?\n[assistant] ", 16)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_ends_where_the_template_ends_it(base: Path, tmp_path: Path) -> None:
    """The end token of the base is another one, and the model writes that of the template in an answer."""
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer))
    end, prompt = (
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        f"<|im_start|>user\n{TURNS[0]}<|im_end|>\n<|im_start|>assistant\n",
    )
    ids = greedy(model, tokenizer(prompt, add_special_tokens=False)["input_ids"], 12)
    place = next(i for i in range(3, 12) if ids[i] not in [*ids[:i], end, tokenizer.eos_token_id])
    with torch.no_grad():
        head = model.lm_head.weight
        head[[end, ids[place]]] = head[[ids[place], end]]
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    expected = tokenizer.decode(ids[:place], skip_special_tokens=True).strip()

    optimizer = {"kind": "sgd", "lr": 0.0}
    language = {"format": "chat", "context": 96, "prompts": [TURNS[0]], "answer_tokens": 12}
    run = run_rounds(
        make_causal_tables(
            tmp_path / "base", tmp_path, language=language, defaults={"batch_size": 8, "optimizer": optimizer}
        ),
        1,
    )
    assert [row["answer"] for row in run.federation.companion.answer(run)] == [expected] * 4
    assert any(f"ends an answer by '<|im_end|>' ({end})" in note for note in run.federation.notes)
    # generate() of transformers stops there, too
    run.federation.companion.write(run, tmp_path / "out", ExportSettings(merged=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "server_merged")
    assert merged.generation_config.eos_token_id == [tokenizer.eos_token_id, end]
    assert merged.config.use_cache is True
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = merged.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=12
    )
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == [*ids[:place], end]
    card = (tmp_path / "out" / "client_0000" / "README.md").read_text()
    assert f"model.generation_config.eos_token_id = [{tokenizer.eos_token_id}, {end}]" in card


def test_samples_of_one_question_differ(base: Path) -> None:
    talk = conversation(base, Decoding(12, "sample", temperature=5.0, special_tokens=False))
    again = conversation(base, Decoding(12, "sample", temperature=5.0, special_tokens=False))
    first, second = talk.reply("who?"), talk.reply("who?")
    assert first != second
    assert again.reply("who?") == first


WRONG = {
    "a model": (["--model", "9"], "from 0 to 2"),
    "tokens": (["--tokens", "0"], "--tokens must be at least 1"),
    "a temperature": (["--temperature", "0"], "--temperature must be above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str, stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, said = WRONG[case]
    assert main(["chat", str(stored / "chat"), "--prompt", "who?", *options]) == 1
    assert said in capsys.readouterr().err


def test_other_runs_do_not_talk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        'method = "fedavg"\n[data]\nsource = "iris"\n[model]\nnames = ["mlp"]\n[run]\nrounds = 1\n'
    )
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    assert main(["chat", str(tmp_path / "run"), "--prompt", "who?"]) == 1
    assert "no language models" in capsys.readouterr().err
    assert main(["chat", str(tmp_path / "nothing"), "--prompt", "who?"]) == 1
    assert "is not a run folder" in capsys.readouterr().err
