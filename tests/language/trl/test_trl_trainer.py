"""TRL's trainer takes the steps of a pass: the same factors as by this package's own steps, and nothing of it stays behind."""

from __future__ import annotations

import importlib
import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import AdamW
from fedlowrank.data.dataset import Examples
from fedlowrank.language.trl.trainer_factories import make_sft_trainer
from fedlowrank.language.trl.training_pass import TrainingPass
from fedlowrank.models.architecture import build_module
from tests.language.text_experiments import make_causal_tables, run_rounds

torch.set_num_threads(1)
pytest.importorskip("trl")


def scores(tables: dict[str, Any], trainer: str, **language: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Scores of every client's own model at the end of a run; and steps, operations and losses of the last round."""
    tables = {**tables, "language": {**tables["language"], "trainer": trainer, **language}}
    run = run_rounds(tables, tables["run"]["rounds"] - 1)
    record = run.step()
    (model,) = run.federation.architectures.values()
    data = run.federation.clients
    with torch.no_grad():
        actual = [
            model.apply(run.personal_params(info), {n: t[:4] for n, t in data[info.id].train.x.items()})
            for info in run.federation.infos
        ]
    return actual, [record.steps, record.training_losses, record.flops]


def assert_equal_runs(tables: dict[str, Any], **language: Any) -> None:
    """Both trainers end alike."""
    (own, costs), (other, others) = scores(tables, "own", trainer_args={}), scores(tables, "trl", **language)
    torch.testing.assert_close(other, own, rtol=2e-3, atol=2e-4)
    assert others[0] == costs[0]
    assert others[1]["local"] == pytest.approx(costs[1]["local"], rel=1e-4)
    assert others[2] == pytest.approx(costs[2], rel=0.02)


def equal_ranks(tables: dict[str, Any]) -> dict[str, Any]:
    """The same with one rank."""
    tables["lora"]["ranks"] = [4]
    return tables


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["fedhl", "flora", "hetlora", "standalone"])
def test_models_are_those_of_own_steps(method: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path, method=method)
    assert_equal_runs(tables)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedit", "ffa_lora", "fedsa_lora", "fedex_lora", "flexlora"])
def test_models_of_further_methods_are_those_of_own_steps(method: str, llama: Path, tmp_path: Path) -> None:
    assert_equal_runs(equal_ranks(make_causal_tables(llama, tmp_path, method=method)))


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {
        "defaults": {
            "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5}
        }
    },
    "schedule": {
        "defaults": {
            "optimizer": {
                "kind": "adamw",
                "lr": 0.01,
                "local_schedule": {"kind": "cosine", "warmup": 1},
                "beta2": 0.9,
            }
        }
    },
    "lora_plus": {"defaults": {"optimizer": {"kind": "adamw", "lr": 0.002, "groups": {"b": {"lr": 0.02}}}}},
    "steps": {"defaults": {"steps": 3, "batch_size": 4}},
    "parts": {"defaults": {"batch_size": 4, "drop_last": True}, "run": {"micro_batch": 2}},
    "alpha": {"defaults": {"training": {"scaling": "alpha"}}},
    "layers": {"lora": {"alpha_pattern": {"v_proj": 32}, "rank_pattern": {"q_proj": 2}}},
    "checkpoints": {"language": {"gradient_checkpointing": True}},
    "left": {"language": {"truncate": "left", "context": 20}},
}


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_pass_mean_the_same(name: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    for section, fields in SETTINGS[name].items():
        tables[section] = {**tables.get(section, {}), **fields}
    assert_equal_runs(tables)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "small penalty": (
        {"method": "hetlora", "methods": {"hetlora": {"prune": 0.9, "penalty": 1e-5}}},
        "adds terms to the loss",
    ),
    "penalty in bfloat16": (
        {"method": "pfedme", "language": {"autocast": "bfloat16"}},
        "adds terms to the loss",
    ),
    "parts of batches": (
        {"language": {"trainer_args": {"per_device_train_batch_size": 2}}},
        "run.micro_batch",
    ),
    "a rate": ({"language": {"trainer_args": {"learning_rate": 1.0}}}, r"optimizer\.lr"),
    "a layer": ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, "the trainer cannot be made"),
    "penalty": (
        {"method": "hetlora", "methods": {"hetlora": {"prune": 0.9, "penalty": 0.01}}},
        "adds terms to the loss",
    ),
    "keep": (
        {
            "method": "fedit",
            "lora": {"ranks": [4]},
            "defaults": {"optimizer": {"kind": "adamw", "lr": 0.01, "keep": True}},
        },
        "keeps the optimizer",
    ),
    "packing": ({"language": {"packing": True}, "partition": {"min_size": 2}}, "packing"),
    "parts": ({"defaults": {"batch_size": 4}, "run": {"micro_batch": 2}}, "equally many in every step"),
    "dropped batches": (
        {"language": {"trainer_args": {"dataloader_drop_last": True}}},
        "drop_last of the method",
    ),
    "saved models": ({"language": {"trainer_args": {"save_strategy": "epoch"}}}, r"run\.checkpoint_every"),
    "the best model": ({"language": {"trainer_args": {"load_best_model_at_end": True}}}, "adapters --best"),
    "another base": (
        {"language": {"trainer_args": {"model_init_kwargs": {"dtype": "float16"}}}},
        r"the section \[language\] \(dtype",
    ),
    "kernels": (
        {"language": {"trainer_args": {"use_liger_kernel": True}}},
        r"the trainer stopped: ImportError: .*Leave out .* language\.trainer_args \(use_liger_kernel\)",
    ),
    "an accelerator": (
        {"language": {"trainer_args": {"activation_offloading": True}}},
        r"the trainer cannot be made: AttributeError: .*trainer_args \(activation_offloading\)",
    ),
    "field": (
        {"language": {"trainer_args": {"optimm": "adafactor"}}},
        r"trainer_args\.optimm has no effect.* Did you mean 'optim'",
    ),
    "field of DPO": (
        {"language": {"trainer_args": {"loss_weights": [3.0]}}},
        r"trl\.SFTConfig has no field 'loss_weights'",
    ),
    "labels": (
        {"language": {"trainer_args": {"label_names": ["labels"]}}},
        r"trainer_args\.label_names has no effect",
    ),
    "no training": ({"language": {"trainer_args": {"do_train": False}}}, r"do_train has no effect"),
    "workers": ({"language": {"trainer_args": {"dataloader_num_workers": 2}}}, r"num_workers has no effect"),
    "sharding": ({"language": {"trainer_args": {"fsdp": "full_shard"}}}, "one process trains a client"),
    "arguments of no optimizer": (
        {"language": {"trainer_args": {"optim_args": "lr=5"}}},
        r"optim_args = 'lr=5' has no effect without optim = ",
    ),
    "modules of no optimizer": (
        {"language": {"trainer_args": {"optim_target_modules": ["q_proj"]}}},
        r"has no effect without optim = 'galore_adamw'",
    ),
    "argument that is not read": (
        {"language": {"trainer_args": {"optim": "adafactor", "optim_args": "clip_threshold=0.1"}}},
        r"optim_args = 'clip_threshold=0\.1' changes nothing with optim = 'adafactor'",
    ),
    "rate of the optimizer": (
        {"language": {"trainer_args": {"optim": "sgd", "optim_args": "momentum=0.5,weight_decay=1"}}},
        r"optim_args = 'weight_decay=1' changes nothing with optim = 'sgd'",
    ),
    "modules that are not read": (
        {"language": {"trainer_args": {"optim": "adafactor", "optim_target_modules": ["q_proj"]}}},
        r"optim_target_modules changes nothing with optim = 'adafactor'",
    ),
    "smoothing": (
        {"language": {"trainer_args": {"label_smoothing_factor": 0.1, "loss_type": "dft"}}},
        r"label_smoothing_factor has no effect here: .* loss_type = 'nll'",
    ),
    "finite losses": ({"language": {"trainer_args": {"logging_nan_inf_filter": True}}}, "would hide a loss"),
    "value": ({"language": {"trainer_args": {"optim": "adamm"}}}, "adamm"),
    "name": ({"language": {"trainer": "trll"}}, "did you mean|Did you mean"),
    "arguments": ({"language": {"trainer": "own", "trainer_args": {"optim": "adafactor"}}}, "trainer_args"),
    "import": ({"language": {"trainer": "no_such_module:make"}}, "cannot be imported"),
    "other": (
        {"language": {"trainer": "tests.language.trl.test_trl_trainer:make_nothing"}},
        "not a transformers.Trainer",
    ),
    "steps": ({"language": {"trainer": "tests.language.trl.test_trl_trainer:make_short"}}, "took 1 steps"),
}


@pytest.mark.filterwarnings("ignore:.use_liger_kernel=True. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trainer_cannot_do_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    changed, words = REFUSED[name]
    tables = make_causal_tables(llama, tmp_path)
    tables["language"]["trainer"] = "trl"
    for section, fields in changed.items():
        tables[section] = {**tables.get(section, {}), **fields} if isinstance(fields, dict) else fields
    if name == "kernels" and importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    if name == "an accelerator" and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises((ConfigError, TaskError), match=words):
        run_rounds(tables)


def make_nothing(given: TrainingPass) -> Any:
    """No trainer."""
    return given.tokenizer


def make_short(given: TrainingPass) -> Any:
    """A trainer of one step."""
    return make_sft_trainer(replace(given, arguments={**given.arguments, "max_steps": 1}))


def make_own(given: TrainingPass) -> Any:
    """A trainer as users write it: a subclass of theirs that draws from Python and torch, with their own order of the rows."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    class Halved(Trainer):  # type: ignore[misc]  # transformers has no types
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            drawn.append((random.random(), float(torch.rand(()))))
            return super().compute_loss(model, inputs, *args, **kwargs) / 2

    known = {"output_dir", "max_steps", "seed", "use_cpu", "report_to", "save_strategy", "disable_tqdm"}
    arguments = {n: v for n, v in given.arguments.items() if n in known}
    return Halved(
        given.model,
        TrainingArguments(**arguments, per_device_train_batch_size=4, learning_rate=0.01),
        DataCollatorForSeq2Seq(given.tokenizer),
        given.rows,
    )


drawn: list[tuple[float, float]] = []


def test_a_trainer_of_one_s_own_comes_again_with_the_seed_and_leaves_nothing(
    llama: Path, tmp_path: Path
) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["language"]["trainer"] = "tests.language.trl.test_trl_trainer:make_own"
    # the one that the name of the setting imports
    draws_of = importlib.import_module("tests.language.trl.test_trl_trainer").drawn
    states, draws = [], []
    for seed in (0, 0, 1):
        draws_of.clear()
        tables["run"]["seed"] = seed
        run = run_rounds(tables, 0)
        (model,) = run.federation.architectures.values()
        before = (
            dict(model.module.named_parameters()),
            model.module.config.to_dict(),
            [*model.module.modules()],
        )
        python, state = random.getstate(), torch.get_rng_state()
        run.step()
        assert random.getstate() == python
        assert torch.equal(torch.get_rng_state(), state)
        after = (
            dict(model.module.named_parameters()),
            model.module.config.to_dict(),
            [*model.module.modules()],
        )
        assert [id(p) for p in before[0].values()] == [id(p) for p in after[0].values()]
        assert before[1:] == after[1:]
        assert not model.training
        states.append(run.state.server)
        draws.append(list(draws_of))
    assert tree.equal(states[0], states[1])
    assert draws[0] == draws[1] != draws[2]
    # clients do not draw the same
    assert len(set(draws[0])) == len(draws[0])


@pytest.mark.full
def test_optimizers_of_transformers_take_the_method_s_rates(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["language"]["trainer_args"] = {"optim": "adafactor"}
    made, _ = scores(tables, "trl")
    plain, _ = scores({**tables, "language": {**tables["language"], "trainer_args": {}}}, "trl")
    assert not torch.allclose(made[0], plain[0], atol=1e-3)
    tables["defaults"] = {"optimizer": {"kind": "adamw", "lr": 0.0}}
    still, _ = scores(tables, "trl")
    # without a rate nothing is learnt, and all clients have the base
    assert not torch.allclose(still[0], made[0], atol=1e-3)


@pytest.mark.full
def test_arguments_of_an_optimizer_are_those_of_torch(llama: Path, tmp_path: Path) -> None:
    """``optim_args`` of SGD: the same models as with the momentum in the settings of the method."""
    tables = make_causal_tables(llama, tmp_path, defaults={"optimizer": {"kind": "sgd", "lr": 0.5}})
    arguments = {"optim": "sgd", "optim_args": "momentum=0.9"}
    actual, _ = scores(tables, "trl", trainer_args=arguments)
    tables["defaults"] = {**tables["defaults"], "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.9}}
    expected, _ = scores(tables, "own", trainer_args={})
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)


class LowRankOptimizers:
    """Chooses an optimizer as transformers does for GaLore, with options for the weights of some modules."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(config: Any, model: Any) -> tuple[Any, dict[str, Any]]:
        modules = config.optim_target_modules
        if modules is None:
            raise ValueError("You need to define `optim_target_modules`")
        rank = dict(entry.split("=") for entry in (config.optim_args or "").split(",") if entry).get(
            "rank", 128
        )
        named = dict(model.named_parameters())
        targets = [n for n in named if any(m in n for m in modules)]
        groups = [
            {"params": [p for n, p in named.items() if n not in targets]},
            {"params": [named[n] for n in targets], "rank": int(rank)},
        ]
        return torch.optim.SGD, {"lr": 9.0, "params": groups}


def test_options_of_some_layers_are_kept_beside_rates_of_the_method(tmp_path: Path) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(3, 2), "v_proj": nn.Linear(3, 2)})
    parameters = dict(model.named_parameters())
    q, v = ([p for n, p in parameters.items() if n.startswith(layer)] for layer in ("q_proj", "v_proj"))
    arguments = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "activation_checkpointing": False,
        "optim": "galore_adamw",
        "optim_args": "rank=3",
        "optim_target_modules": ["q_proj"],
    }
    given = TrainingPass(
        model,
        None,
        None,
        [],
        [
            {"params": [q[0], v[0]], "lr": 0.1, "weight_decay": 0.0},
            {"params": [q[1], v[1]], "lr": 0.2, "weight_decay": 0.3},
        ],
        AdamW(lr=0.1),
        ClientInfo(0, 1, "model"),
        0,
        0,
        arguments,
        Examples(torch.zeros(1, 2), torch.zeros(1, 1)),
    )
    optimizer = given.make_torch_optimizer(LowRankOptimizers)
    actual = {
        name: (g["lr"], g["weight_decay"], g.get("rank"))
        for name, parameter in parameters.items()
        for g in optimizer.param_groups
        if any(p is parameter for p in g["params"])
    }
    assert actual == {
        "q_proj.weight": (0.1, 0.0, 3),
        "q_proj.bias": (0.2, 0.3, 3),
        "v_proj.weight": (0.1, 0.0, None),
        "v_proj.bias": (0.2, 0.3, None),
    }
    unread = replace(given, arguments={**arguments, "optim_args": "rank=3,rang=2"})
    with pytest.raises(ConfigError, match=r"optim_args = 'rang=2' changes nothing"):
        unread.make_torch_optimizer(LowRankOptimizers)


def test_one_machine_may_have_another_trainer(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["language"] |= {"trainer": "trl", "trainer_args": {"optim": "adafactor"}}
    for local, trainer, arguments in (
        ({}, "trl", {"optim": "adafactor"}),
        ({"trainer": "own"}, "own", {}),
        ({"trainer_args": {"optim": "adamw_torch"}}, "trl", {"optim": "adamw_torch"}),
    ):
        actual = ExperimentConfig.parse({**tables, "local": local}).language_here
        assert actual is not None
        assert (actual.trainer, dict(actual.trainer_args)) == (trainer, arguments)


@pytest.mark.parametrize("section", ["language", "local"])
def test_a_trainer_of_somebody_else_is_not_imported(section: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables[section] = {**tables.get(section, {}), "trainer": "somebody:make"}
    with pytest.raises(ConfigError, match="somebody:make"):
        ExperimentConfig.parse(tables, allow_code=False)


@pytest.mark.full
def test_dropout_and_noise_are_no_terms_of_the_loss(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(
        llama, tmp_path, language={"trainer": "trl", "neftune": 5.0}, lora={"lora_dropout": 0.3}
    )
    tables["defaults"] = {"optimizer": {"kind": "adamw", "lr": 0.2}}
    run = run_rounds(tables, 1)
    (model,) = run.federation.architectures.values()
    # as in a process that begins now
    model.pass_trainer._compared.clear()
    run.step()
    again = run_rounds(tables, 2)
    assert tree.equal(run.state.server, again.state.server)


def make_half(given: TrainingPass) -> Any:
    """A trainer that rounds the factors, as TRL's does on a quantized base, and leaves a hook."""
    made = make_sft_trainer(given)
    for p in made.model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    made.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    made.model.generation_config.eos_token_id = [1, 2]
    return made


def test_factors_stay_in_their_type_and_hooks_are_taken_off(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    plain, _ = scores(tables, "trl")
    made, _ = scores(tables, "tests.language.trl.test_trl_trainer:make_half")
    torch.testing.assert_close(made, plain)
    tables["language"]["trainer"] = "tests.language.trl.test_trl_trainer:make_half"
    run = run_rounds(tables, 0)
    (model,) = run.federation.architectures.values()
    before = model.module.generation_config.to_dict()
    run.step()
    assert model.may_run_again
    assert model.module.generation_config.to_dict() == before


@pytest.mark.full
def test_a_loss_of_routers_is_not_added(llama: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": len(tokenizer),
        "router_aux_loss_coef": 0.1,
    }
    base = tmp_path / "mixtral"
    made = build_module(
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, **more)), Key((0,))
    )
    made.save_pretrained(base)
    tokenizer.save_pretrained(base)
    tables = make_causal_tables(base, tmp_path)
    tables["language"]["trainer"] = "trl"
    with pytest.raises(TaskError, match="router_aux_loss_coef = 0"):
        run_rounds(tables, 1)
    assert_equal_runs(tables, trainer_args={"router_aux_loss_coef": 0.0})
