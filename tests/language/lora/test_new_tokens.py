"""New tokens: a step is PEFT's with ``trainable_token_indices``, rows are averaged whole, and exports load in PEFT."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.stored_run import open_run
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.models.architecture import build_module
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml
from tests.support.counting_engine import CountingEngine

torch.set_num_threads(1)

TOKENS = ["<|im_start|>", "<|im_end|>"]
ROWS = "base_model.model.{}.token_adapter.trainable_tokens_delta.default"
EMBEDDING, OUTPUT = ROWS.format("model.embed_tokens"), ROWS.format("lm_head")


@pytest.fixture(scope="module")
def tied(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with tied weights, whose embedding has 3 rows beyond the vocabulary."""
    folder = tmp_path_factory.mktemp("tied_tokens")
    config = transformers.AutoConfig.from_pretrained(llama)
    config.tie_word_embeddings = True
    config.vocab_size += 3
    build_module(lambda: transformers.LlamaForCausalLM(config), Key((3,))).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def tables_of(base: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Texts with new tokens in the prompt and in the response."""
    more = {"language": {}, "lora": {"r": 2, "ranks": [2]}, **more}
    more["language"] = {"new_tokens": TOKENS, **more["language"]}
    tables = make_causal_tables(base, folder, **more)
    rows = [
        {
            "prompt": f"<|im_start|>who is {i % 7}?",
            "response": f"the {'fox' if i % 2 else 'dog'}<|im_end|>",
            "kind": "ab"[i % 2],
        }
        for i in range(60)
    ]
    Path(tables["data"]["path"]).write_text("\n".join(map(json.dumps, rows)))
    return tables


def rows_of(run: Run, client: int = 0) -> Tensor:
    return run.personal_params(run.federation.infos[client])[EMBEDDING]


def plain_base(base: Path) -> tuple[Any, list[int]]:
    """The base with the tokens as transformers adds them, rows of the mean; and their ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    count = len(tokenizer)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[count : count + 2] = layer.weight[:count].mean(0)
    return model, [count, count + 1]


def score_with_peft(base: Path, folder: Path, ids: Tensor) -> Tensor:
    """Scores of an adapter folder as its users compute them, with the tokenizer of the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    if len(tokenizer) > plain.get_input_embeddings().num_embeddings:
        plain.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        actual: Tensor = peft.PeftModel.from_pretrained(plain, folder).eval()(input_ids=ids).logits
    return actual


def score_in_memory(run: Run, client: int, ids: Tensor) -> Tensor:
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(run.personal_params(run.federation.infos[client])) as model:
        actual: Tensor = model(input_ids=ids).logits
    return actual


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a_step_is_that_of_plain_peft(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    base = request.getfixturevalue(name)
    run = run_rounds(
        tables_of(
            base,
            tmp_path,
            method="fedit",
            partition={"clients": 1, "alpha": 1.0},
            defaults={"batch_size": 1000, "steps": 1, "optimizer": {"kind": "sgd", "lr": 0.3}},
        ),
        0,
    )
    before = {n: p.clone() for n, p in run.personal_params(run.federation.infos[0]).items()}
    run.step()
    after = run.personal_params(run.federation.infos[0])
    model, ids = plain_base(base)
    layers = {"embed_tokens": ids} if name == "tied" else {"embed_tokens": ids, "lm_head": ids}
    config = peft.LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        trainable_token_indices=layers,
    )
    plain = peft.get_peft_model(model, config)
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    assert set(trained) == set(before)
    assert (OUTPUT in trained) == (name == "llama")
    with torch.no_grad():
        for key, parameter in trained.items():
            if "lora_" in key:
                parameter.copy_(before[key])
            else:
                # the mean of the rows, as above
                torch.testing.assert_close(before[key], parameter.detach())
    data = run.federation.clients[0].train
    assert isinstance(data.x, dict)
    assert all((data.x["input_ids"] == i).any() for i in ids)
    loss = plain(**data.x, labels=data.y).loss
    grads = torch.autograd.grad(loss, list(trained.values()))
    for (key, parameter), grad in zip(trained.items(), grads, strict=True):
        torch.testing.assert_close(after[key], parameter - 0.3 * grad, rtol=0, atol=2e-6)
    assert (after[EMBEDDING] - before[EMBEDDING]).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("method", "name"), [("fedit", "tied"), ("fedhl", "llama"), ("flora", "llama"), ("fedsa_lora", "tied")]
)
def test_folders_load_in_peft_and_the_next_run_starts_from_them(
    method: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(name)
    lora = {"r": 2, "ranks": [2, 1, 1] if method in ("fedhl", "flora") else [2]}
    file = write_toml(tables_of(base, tmp_path, method=method, lora=lora), tmp_path / "e.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 0
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--exact"]) == 0
    run = open_run(tmp_path / "run", "")
    language: Any = run.federation.companion
    _, ids = plain_base(base)
    tokens = torch.tensor([[1, ids[0], 9, 7, ids[1], 6]])
    start = run.federation.architectures["language"].initial[EMBEDDING]
    folder = tmp_path / "out" / "client_0000"
    for k in (0, 1):
        assert (rows_of(run, k) - start).abs().max() > 1e-3
        actual = score_with_peft(
            tmp_path / "out" / "base" if method == "flora" else base,
            tmp_path / "out" / f"client_{k:04d}",
            tokens,
        )
        torch.testing.assert_close(actual, score_in_memory(run, k, tokens), rtol=0, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(TOKENS) == ids
    assert language.loaded.tokenizer.convert_tokens_to_ids(TOKENS) == ids
    # the code of the card is the one above
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    scope: dict[str, Any] = {}
    exec(code.group(1).replace("FOLDER", str(folder)), scope)
    with torch.no_grad():
        by_card = scope["model"].eval()(input_ids=tokens).logits
    torch.testing.assert_close(by_card, score_in_memory(run, 0, tokens), rtol=0, atol=1e-5)
    if method == "flora":
        return
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "m"), "--exact", "--merged"]) == (
        0 if method != "fedsa_lora" else 1
    )
    if method != "fedsa_lora":
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m" / "server_merged")
        adapter = score_with_peft(base, tmp_path / "m" / "server", tokens)
        with torch.no_grad():
            torch.testing.assert_close(merged(input_ids=tokens).logits, adapter, rtol=0, atol=1e-5)
    tables = tables_of(base, tmp_path, method=method, lora={"start": str(folder)})
    for field in ("r", "lora_alpha", "target_modules", "ranks"):
        tables["lora"].pop(field, None)
    following = run_rounds(tables, 0)
    torch.testing.assert_close(
        score_in_memory(following, 0, tokens), score_in_memory(run, 0, tokens), rtol=0, atol=1e-5
    )
    tables["language"]["new_tokens"] = TOKENS[:1]
    with pytest.raises(ConfigError, match=r"rows of the tokens .* Set language\.new_tokens"):
        run_rounds(tables, 0)


@pytest.mark.parametrize("method", ["fedhl", "hetlora", "flexlora"])
def test_methods_that_truncate_average_the_rows_whole(method: str, llama: Path, tmp_path: Path) -> None:
    """The shared rows of a round are the mean, weighted by examples, of the rows that each client trained."""
    runs = {
        head: run_rounds(
            tables_of(
                llama,
                tmp_path,
                method=method,
                lora={"r": 4, "ranks": [4, 2, 1]},
                methods={method: {"training": {"head": head}}},
            ),
            1,
        )
        for head in ("personal", "shared")
    }
    infos = runs["personal"].federation.infos
    counts = torch.tensor([info.example_count for info in infos], dtype=torch.float32)
    own = torch.stack([rows_of(runs["personal"], info.id) for info in infos])
    assert (own[0] - own[1]).abs().max() > 1e-4
    mean = (own * counts[:, None, None]).sum(0) / counts.sum()
    for info in infos:
        torch.testing.assert_close(rows_of(runs["shared"], info.id), mean, rtol=0, atol=1e-6)


def test_clients_together_and_trl_train_the_same_rows(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    made = []
    for trainer, engine in (("own", None), ("own", CountingEngine()), ("trl", None)):
        config = ExperimentConfig.parse(tables_of(llama, tmp_path, language={"trainer": trainer}))
        run = (
            run_rounds(tables_of(llama, tmp_path, language={"trainer": trainer}), 2)
            if engine is None
            else Run(config.build_method(config.default_method), config.federation(), config.run, engine)
        )
        if engine is not None:
            run.step()
            run.step()
            assert engine.sizes
        made.append(run)
    for other in made[1:]:
        torch.testing.assert_close(rows_of(other), rows_of(made[0]), rtol=1e-3, atol=2e-4)


def test_a_known_token_keeps_its_row_and_noise_is_added(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(tables_of(llama, tmp_path, language={"new_tokens": ["</s>", "<|im_end|>"]}), 0)
    weight = transformers.AutoModelForCausalLM.from_pretrained(llama).get_input_embeddings().weight
    end = transformers.AutoTokenizer.from_pretrained(llama).eos_token_id
    assert torch.equal(rows_of(run)[0], weight[end])
    plain, noisy = (
        run_rounds(tables_of(llama, tmp_path, language={"neftune": alpha}), 1) for alpha in (0.0, 5.0)
    )
    assert (rows_of(plain) - rows_of(noisy)).abs().max() > 1e-4


def test_rows_are_float32_over_a_base_in_half_precision(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(tables_of(llama, tmp_path, language={"dtype": "bfloat16"}), 1)
    start = run.federation.architectures["language"].initial[EMBEDDING]
    assert rows_of(run).dtype == torch.float32
    assert (rows_of(run) - start).abs().max() > 1e-3


def test_machines_compare_their_tokens(llama: Path, tmp_path: Path) -> None:
    files = []
    for tokens in (TOKENS, TOKENS, TOKENS[::-1]):
        language: Any = run_rounds(tables_of(llama, tmp_path, language={"new_tokens": tokens}), 0)
        files.append(language.federation.companion.files)
    assert files[0] == files[1]
    assert {n for n in files[0] if files[0][n] != files[2][n]} == {"language.new_tokens"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"language": {"new_tokens": ["a", "a"]}}, "names 'a' twice"),
    "empty": ({"language": {"new_tokens": [" "]}}, "token 0 is ' '"),
    "factors": (
        {"lora": {"ranks": [2], "r": 2, "target_modules": ["q_proj", "lm_head"]}},
        r"trains rows of lm_head, which lora\.target_modules adapts",
    ),
    "PEFT's field": (
        {"lora": {"ranks": [2], "r": 2, "trainable_token_indices": [3]}},
        r"those of language\.new_tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    changed, words = REFUSED[name]
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=words):
        run_rounds(tables_of(llama, tmp_path, **changed), 0)


def test_a_layer_that_is_trained_whole_has_no_rows(llama: Path, tmp_path: Path) -> None:
    lora = {"ranks": [2], "r": 2, "modules_to_save": ["lm_head"]}
    run = run_rounds(tables_of(llama, tmp_path, method="fedit", lora=lora), 0)
    names = run.federation.architectures["language"].initial
    assert EMBEDDING in names
    assert OUTPUT not in names
    assert "base_model.model.lm_head.weight" in names
