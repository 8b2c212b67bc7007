"""``language.trainer = "trl"``: TRL's ``SFTTrainer``, or a trainer of the user, takes the steps of a pass.

Factors are put into the module of PEFT, ``trainer.train()`` is called, and the trained factors are read from the module. The
rest of a federated method does not change. The trainer adds features that this package does not have: further optimizers
(``optim = "adamw_8bit"``, "adafactor"), gradient accumulation, kernels, and the code of a user's own subclass.

Before the first pass with a loss, the method's loss of one batch is compared with the trainer's loss. A method that adds terms
to the loss is rejected, because the trainer would not train them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core import tree
from ...core.arguments.user_code import import_named
from ...core.contract import Batch, ClientInfo
from ...core.contract.training_request import Request
from ...core.errors import ConfigError, TaskError, did_you_mean
from ...core.learning.batch_losses import task_loss
from ...core.learning.optimizer import AdamW, Optimizer
from ...data.dataset import Examples
from ...models.architecture import Architecture
from ...models.standard import HOOK_TABLES
from ...models.stateless import unchanged
from ...training.captured_variables import code_of
from ...training.local_data import LocalData
from ...training.steps import refill
from ..optional_packages import import_library, silence_library
from .leaf_placement import Placement, find_places

IGNORED = -100
"""Label of a token that does not count, as in transformers."""


_LOSS_TOLERANCE = 1e-5
"""Maximum relative difference of two losses that count as equal."""

_RESERVED_FIELDS = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "auto_find_batch_size"), "batch_size and run.micro_batch"
    ),
    "gradient_accumulation_steps": "run.micro_batch",
    **dict.fromkeys(("max_steps", "num_train_epochs"), "steps or epochs"),
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip",
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio", "lr_scheduler_type", "lr_scheduler_kwargs"),
        "optimizer.local_schedule",
    ),
    **dict.fromkeys(("seed", "data_seed", "full_determinism"), "run.seed"),
    **dict.fromkeys(("use_cpu", "no_cuda"), "run.device"),
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), "language.autocast"),
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
            *("activation_checkpointing", "activation_checkpointing_kwargs"),
        ),
        "language.gradient_checkpointing",
    ),
    **dict.fromkeys(("max_length", "truncation_mode"), "language.context and language.truncate"),
    **dict.fromkeys(("packing", "packing_strategy", "eval_packing", "padding_free"), "language.packing"),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "language.loss_on"),
    "neftune_noise_alpha": "language.neftune",
    **dict.fromkeys(("group_by_length", "train_sampling_strategy"), "language.by_length"),
    **dict.fromkeys(("eos_token", "pad_token", "chat_template_path"), "the tokenizer in the base's folder"),
    **dict.fromkeys(
        ("eval_strategy", "do_eval", "eval_steps", "metric_for_best_model"), "run.evaluate_every"
    ),
    **dict.fromkeys(
        (
            "dataset_kwargs",
            "dataset_text_field",
            "dataset_num_proc",
            "remove_unused_columns",
            "shuffle_dataset",
        ),
        "the section [data]",
    ),
    "dataloader_drop_last": "drop_last of the method",
    "model_init_kwargs": "the section [language] (dtype, attention, quantize)",
    **dict.fromkeys(("load_best_model_at_end", "greater_is_better"), "`fedlowrank adapters --best`"),
    **dict.fromkeys(
        (
            *("output_dir", "resume_from_checkpoint", "save_strategy", "save_steps", "save_total_limit"),
            *("save_only_model", "restore_callback_states_from_checkpoint"),
        ),
        "run.checkpoint_every, and run.adapters,",
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
        "the section [export]",
    ),
}
"""Fields of ``trl.SFTConfig`` that the user must not set, with the setting of the method or experiment that sets each."""

_TRAINER_ERRORS = (ValueError, TypeError, ImportError, AttributeError, LookupError, NotImplementedError)
"""Exceptions that trainers raise if settings do not fit the model, the machine or each other."""


@dataclass(frozen=True)
class TrainingPass:
    """One pass of one client, the argument of a trainer factory.

    Attributes:
        model: ``peft.PeftModel`` that holds the client's factors; trained parameters require a gradient.
        tokenizer: tokenizer of the base.
        rows: a ``datasets.Dataset`` of the client's texts with ``input_ids`` and ``labels``, -100 where a token does not count.
        batches: row indices of each step.
        parameters: parameter groups of a torch optimizer: trained parameters with learning rate and weight decay.
        optimizer: optimizer settings of the method.
        client: the client of the pass.
        round: round of the pass, counted from 0.
        seed: seed of the trainer, different for each client and round.
        arguments: fields of ``trl.SFTConfig``: the fields that this run sets, updated by ``language.trainer_args``.
            ``max_steps`` is the number of steps that must be taken.
        examples: the rows as examples of this package.
    """

    model: Any
    tokenizer: Any
    rows: Any
    batches: list[list[int]]
    parameters: list[dict[str, Any]]
    optimizer: Optimizer
    client: ClientInfo
    round: int
    seed: int
    arguments: Mapping[str, Any]
    examples: Examples

    def make_torch_optimizer(self, trainer: Any) -> torch.optim.Optimizer:
        """Make the method's optimizer in torch; or the optimizer ``trainer_args.optim`` with the method's learning rates.

        Args:
            trainer: the trainer class, which makes the optimizers of transformers.
        """
        o = self.optimizer
        if "optim" in self.arguments:
            config = make_config(dict(self.arguments) | _list_adam_arguments(o))
            optimizer_class, options = trainer.get_optimizer_cls_and_kwargs(config, self.model)
            options = {name: value for name, value in options.items() if name not in ("lr", "params")}
            optimizer: torch.optim.Optimizer = optimizer_class(self.parameters, lr=o.lr, **options)
            return optimizer
        if isinstance(o, AdamW):
            return torch.optim.AdamW(self.parameters, betas=(o.beta1, o.beta2), eps=o.eps)
        return torch.optim.SGD(self.parameters, momentum=o.momentum, nesterov=o.nesterov)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Make the learning-rate schedule within the pass."""
        steps, scale = len(self.batches), self.optimizer.local_schedule.scale
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale(step, steps, self.round))


def _list_adam_arguments(optimizer: Optimizer) -> dict[str, float]:
    """List the settings of Adam by their names in transformers."""
    if not isinstance(optimizer, AdamW):
        return {}
    return {
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
    }


def make_config(arguments: Mapping[str, Any]) -> Any:
    """Make a ``trl.SFTConfig`` from its fields.

    Raises:
        ConfigError: if ``trl.SFTConfig`` lacks a field or rejects a value.
    """
    library = import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")
    known = {f.name for f in fields(library.SFTConfig)}
    if unknown := sorted(arguments.keys() - known):
        raise ConfigError(
            f"language.trainer_args: trl.SFTConfig has no field {unknown[0]!r} (trl {library.__version__})"
        )
    try:
        return library.SFTConfig(**arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"language.trainer_args: trl.SFTConfig refuses them: {error}") from error


def make_sft_trainer(training_pass: TrainingPass) -> Any:
    """Make TRL's ``SFTTrainer`` with the batches, the optimizer and the schedule of the method."""
    library = import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")

    class OrderedTrainer(library.SFTTrainer):  # type: ignore[misc, name-defined]  # TRL has no types
        """An ``SFTTrainer`` that uses the batches of the pass."""

        def get_train_dataloader(self) -> Any:
            """Make a loader of the batches in their order, split into parts for gradient accumulation."""
            size = self.args.per_device_train_batch_size
            parts = [b[a : a + size] for b in training_pass.batches for a in range(0, len(b), size)]
            loader: Any = torch.utils.data.DataLoader(
                self.train_dataset, batch_sampler=parts, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    optimizer = training_pass.make_torch_optimizer(library.SFTTrainer)
    return OrderedTrainer(
        model=training_pass.model,
        args=make_config(training_pass.arguments),
        train_dataset=training_pass.rows,
        processing_class=training_pass.tokenizer,
        optimizers=(optimizer, training_pass.make_scheduler(optimizer)),
    )


@dataclass
class TrlTrainer:
    """Trains passes in the module of an architecture, see :class:`fedlowrank.training.trainer.PassTrainer`.

    Attributes:
        tokenizer: tokenizer of the base.
        factory: makes the trainer of a pass.
        arguments: ``language.trainer_args``.
        autocast: ``language.autocast``.
        name: ``language.trainer``, for messages.
    """

    tokenizer: Any
    factory: Callable[[TrainingPass], Any]
    arguments: Mapping[str, Any]
    autocast: str
    name: str
    _compared: set[Any] = field(default_factory=set, repr=False)

    def __call__(
        self, request: Request, data: LocalData, model: Architecture, round: int, micro_batch: int | None
    ) -> tuple[Any, Tensor]:
        """Train a pass; returns the trained tree and the mean loss of its steps ``[1]``.

        Raises:
            TaskError: if the pass needs more than the gradient steps of a trainer.
        """
        self._check_request(request, data)
        key = data.key / "trainer" / request.name
        first = next(data.batches(request.name))
        placement = find_places(request, first, model, (key / "probe").generator())
        starts = [t.detach().clone() for _, t in tree.leaves(request.start)]
        parameters = [nn.Parameter(t.clone()) for t in starts]
        # trainers change the configuration, such as whether routers of experts return their logits
        config, generation = model.module.config, getattr(model.module, "generation_config", None)
        former_settings = [(vars(c), copy.deepcopy(vars(c))) for c in (config, generation) if c is not None]
        former_hooks = [
            (table, dict(table))
            for layer in model.module.modules()
            for name in HOOK_TABLES
            if (table := getattr(layer, name)) is not None
        ]
        try:
            with (
                unchanged(model.module),
                placement.install(parameters),
                silence_library(import_library("transformers", "a language model")),
                tempfile.TemporaryDirectory() as folder,
            ):
                loss_kind = code_of(request.loss), data.loss
                start_loss = None
                if loss_kind not in self._compared:
                    start_loss = self._compare_losses(placement, first, model, parameters, starts)
                training_pass = self._make_training_pass(
                    request, data, model, round, parameters, micro_batch, Path(folder)
                )
                mean = self._train(training_pass, parameters, starts, start_loss)
                self._compared.add(loss_kind)
        finally:
            for table, former in (*former_settings, *former_hooks):
                table.clear()
                table.update(former)
        model.set_training(True)
        end = refill(request.start, [p.detach().to(t.dtype) for p, t in zip(parameters, starts, strict=True)])
        return end, torch.tensor([mean], dtype=torch.float64)

    def _check_request(self, request: Request, data: LocalData) -> None:
        """Raise TaskError if a pass needs something that a trainer does not do."""
        term = request.proximal_term
        reason = next(
            (
                text
                for text, applies in (
                    ("changes the gradient before each step", request.precondition is not None),
                    ("applies a proximal step after each step", request.prox is not None),
                    (
                        "adds a proximal term",
                        term is not None and (bool(term.strength) or term.linear is not None),
                    ),
                    ("keeps the optimizer from round to round (optimizer.keep)", request.kept is not None),
                )
                if applies
            ),
            None,
        )
        if reason is not None:
            raise TaskError(
                f"language.trainer = {self.name!r}: the method {reason}, which no trainer does. Take trainer = 'own'"
            )
        if not data.examples.has_token_labels:
            raise TaskError(
                f"language.trainer = {self.name!r} trains on the next token alone. Take trainer = 'own' for pairs, classes and "
                "embeddings"
            )

    def _compare_losses(
        self,
        placement: Placement,
        batch: Batch,
        model: Architecture,
        parameters: list[nn.Parameter],
        starts: list[Tensor],
    ) -> float:
        """Compare the method's loss of a batch with that of the task, in the module itself.

        Both losses are computed at the probe, because a penalty may be zero at the initial values.

        Returns:
            The loss of the batch at the initial values.
        """
        model.set_training(False)
        with torch.no_grad():
            try:
                for p, t in zip(parameters, placement.probe, strict=True):
                    p.copy_(t)
                task_value = float(task_loss(model.apply({}, batch.x), batch))
            finally:
                for p, t in zip(parameters, starts, strict=True):
                    p.copy_(t)
            at_start = float(task_loss(model.apply({}, batch.x), batch))
        model.set_training(True)
        # both losses use the same operations; only a multiple of a factor may be rounded differently
        if not abs(task_value - placement.value) <= _LOSS_TOLERANCE * max(1.0, abs(placement.value)):
            raise TaskError(
                f"language.trainer = {self.name!r}: the method's loss of a batch is {placement.value:.6g}, and that of the "
                f"tokens alone {task_value:.6g}: it adds terms to the loss, which a trainer would leave out. Take trainer = 'own'"
            )
        return at_start

    def _explain_error(self, error: Exception) -> str:
        """Describe an error of a trainer, with the settings that may cause it."""
        argument_names = ", ".join(sorted(self.arguments))
        hint = f" Leave out what this machine or model does not have of language.trainer_args ({argument_names})."
        return f"{type(error).__name__}: {error}" + (hint if argument_names else "")

    def _compare_trainers(self, trainer: Any, training_pass: TrainingPass, loss: float) -> None:
        """Compare TRL's loss of the first batch, at the initial values, with this package's loss."""
        module = training_pass.model
        inputs = trainer.data_collator([training_pass.rows[i] for i in training_pass.batches[0]])
        module.eval()
        with torch.no_grad():
            device = next(module.parameters()).device
            trl_loss = float(trainer.compute_loss(module, {n: t.to(device) for n, t in inputs.items()}))
        module.train()
        tolerance = 1e-3 if self.autocast == "none" and module.dtype == torch.float32 else 5e-2
        if not abs(trl_loss - loss) <= tolerance * max(1.0, abs(loss)):
            raise TaskError(
                f"language.trainer = {self.name!r}: the loss of a batch is {trl_loss:.6g} by TRL and {loss:.6g} here. TRL adds a "
                "loss of the routers of experts: set language.trainer_args.router_aux_loss_coef = 0, or take trainer = 'own'"
            )

    def _make_training_pass(
        self,
        request: Request,
        data: LocalData,
        model: Architecture,
        round: int,
        parameters: list[nn.Parameter],
        micro_batch: int | None,
        folder: Path,
    ) -> TrainingPass:
        """Make the argument of the trainer factory."""
        batches = [index.tolist() for index in data.order(request.name)]
        rates = request.optimizer.rates([path for path, _ in tree.leaves(request.start)], round)
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p, lr, decay in zip(parameters, rates.lr, rates.weight_decay, strict=True):
            groups.setdefault((lr, decay), []).append(p)
        largest = max(map(len, batches))
        size = largest if micro_batch is None else min(micro_batch, largest)
        parts = {-(-len(b) // size) for b in batches}
        if len(parts) > 1:
            raise ConfigError(
                f"language.trainer = {self.name!r}: run.micro_batch = {micro_batch} divides the batches of {data.info.title} in "
                f"{min(parts)} to {max(parts)} parts, and a trainer accumulates equally many in every step. Set drop_last = true "
                "in the method, or another micro_batch"
            )
        seed = int((data.key / "trainer" / request.name).seed() % 2**31)
        device = next(iter(parameters)).device
        defaults = {
            "output_dir": str(folder),
            "max_steps": len(batches),
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": max(parts),
            "learning_rate": request.optimizer.learning_rate(round),
            "max_grad_norm": request.optimizer.clip or 0.0,
            "seed": seed,
            "data_seed": seed,
            "use_cpu": device.type == "cpu",
            "bf16": self.autocast == "bfloat16",
            "fp16": self.autocast == "float16",
            # the base recomputes activations itself, where the settings say so
            "activation_checkpointing": False,
            "max_length": None,
            "packing": False,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "remove_unused_columns": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        rows = import_library("datasets", "language.trainer").Dataset.from_list(list_rows(data.examples))
        return TrainingPass(
            model.module,
            self.tokenizer,
            rows,
            batches,
            [{"params": ps, "lr": lr, "weight_decay": wd} for (lr, wd), ps in groups.items()],
            request.optimizer,
            data.info,
            round,
            seed,
            defaults | dict(self.arguments),
            data.examples,
        )

    def _train(
        self,
        training_pass: TrainingPass,
        parameters: list[nn.Parameter],
        starts: list[Tensor],
        loss: float | None,
    ) -> float:
        """Make the trainer, run it, and return the mean loss.

        Args:
            training_pass: the pass.
            parameters: trained parameters in the module.
            starts: initial values of the parameters.
            loss: loss of the first batch, to compare TRL's loss with; None for no comparison.
        """
        where = f"language.trainer = {self.name!r}, {training_pass.client.title}, round {training_pass.round}"
        try:
            trainer = self.factory(training_pass)
        except _TRAINER_ERRORS as error:
            raise TaskError(f"{where}: the trainer cannot be made: {self._explain_error(error)}") from error
        for p, t in zip(parameters, starts, strict=True):
            if p.dtype != t.dtype:
                # TRL casts the factors of a quantized base to a lower precision; restore them before the first step
                p.data = t.clone()
        trainer_class = import_library("transformers", "language.trainer").Trainer
        if not isinstance(trainer, trainer_class):
            raise TaskError(
                f"{where}: the factory returned a {type(trainer).__name__}, not a transformers.Trainer"
            )
        has_own_loss = self.arguments.keys() & {"loss_type", "label_smoothing_factor"}
        if loss is not None and self.factory is make_sft_trainer and not has_own_loss:
            self._compare_trainers(trainer, training_pass, loss)
        # without a progress bar, this callback would print the logs
        trainer.remove_callback(import_library("transformers", "language.trainer").PrinterCallback)
        try:
            result = trainer.train()
        except _TRAINER_ERRORS as error:
            raise TaskError(f"{where}: the trainer stopped: {self._explain_error(error)}") from error
        if result.global_step != len(training_pass.batches):
            raise TaskError(
                f"{where}: the trainer took {result.global_step} steps and the pass has {len(training_pass.batches)}. Give it "
                "max_steps = given.arguments['max_steps']"
            )
        return float(result.training_loss)


def list_rows(examples: Examples) -> list[dict[str, list[int]]]:
    """List texts as rows of ``input_ids`` and ``labels`` without padding.

    Raises:
        TaskError: if the texts have other inputs, such as ``position_ids`` of packed rows.
    """
    x = examples.x
    assert isinstance(x, dict)
    if other_inputs := sorted(x.keys() - {"input_ids", "attention_mask"}):
        raise TaskError(
            f"a trainer of TRL takes texts without {other_inputs[0]!r}; set language.packing = false, or trainer = 'own'"
        )
    rows = []
    for tokens, mask, labels in zip(x["input_ids"], x["attention_mask"], examples.y, strict=True):
        # the mask also removes padding on the left
        is_text = mask.bool()
        rows.append(
            {
                "input_ids": tokens[is_text].tolist(),
                "labels": torch.where(labels < 0, IGNORED, labels)[is_text].tolist(),
            }
        )
    return rows


def check_trainer(name: str, arguments: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError for an unknown trainer, for reserved arguments, and for arguments without a trainer.

    Args:
        name: ``own``, ``trl`` or ``module:function``.
        arguments: ``trainer_args``, fields of ``trl.SFTConfig``.
        section: section of the settings, for messages.
    """
    if name not in ("own", "trl") and ":" not in name:
        raise ConfigError(
            f"{section}.trainer is {name!r}; it is 'own', 'trl', or 'module:function' of yours. "
            f"{did_you_mean(name, ('own', 'trl'))}"
        )
    if reserved := sorted(arguments.keys() & _RESERVED_FIELDS.keys()):
        raise ConfigError(
            f"{section}.trainer_args.{reserved[0]}: {_RESERVED_FIELDS[reserved[0]]} says so for all trainers. Set it there"
        )
    if name == "own" and arguments:
        raise ConfigError(
            f"{section}.trainer_args are read where {section}.trainer is 'trl' or a function of yours; it is 'own'"
        )


def find_trainer(name: str, arguments: Mapping[str, Any], tokenizer: Any, autocast: str) -> TrlTrainer | None:
    """Find a trainer by its name; None for this package's own steps. A trainer of the user is imported."""
    if name == "own":
        return None
    if name != "trl":
        factory = import_named(name, "language.trainer")
        if not callable(factory):
            raise ConfigError(f"language.trainer: {name!r} is no function")
        return TrlTrainer(tokenizer, factory, arguments, autocast, name)
    import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")
    return TrlTrainer(tokenizer, make_sft_trainer, arguments, autocast, name)
