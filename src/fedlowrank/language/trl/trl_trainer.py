"""``language.trainer = "trl"``: TRL's trainer, or a trainer of the user, takes the steps of a pass.

TRL's trainer is ``SFTTrainer`` for texts, and ``DPOTrainer`` for pairs of responses with the loss ``dpo``.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core import tree
from ...core.arguments.user_code import import_named
from ...core.contract import Batch
from ...core.contract.training_request import Request
from ...core.errors import ConfigError, TaskError, did_you_mean
from ...core.learning.batch_losses import task_loss
from ...core.learning.losses import Loss
from ...models.architecture import Architecture
from ...models.standard import HOOK_TABLES
from ...models.stateless import unchanged
from ...training.captured_variables import code_of
from ...training.local_data import LocalData
from ...training.steps import refill
from ..optional_packages import import_library, silence_library
from .leaf_placement import Placement, find_leaf_slots
from .trainer_factories import make_trl_trainer
from .trainer_fields import LOSS_FIELDS, check_trainer_fields, reads_label_smoothing
from .trainer_rows import list_pairs, list_rows
from .training_pass import TrainingPass

_LOSS_TOLERANCE = 1e-5
"""Maximum relative difference of two losses that count as equal."""

_TRAINER_ERRORS = (ValueError, TypeError, ImportError, AttributeError, LookupError, NotImplementedError)
"""Exceptions that trainers raise if settings do not fit the model, the machine or each other."""


@dataclass
class TrlTrainer:
    """Trains passes in the module of an architecture, see :class:`fedlowrank.training.trainer.PassTrainer`.

    Attributes:
        tokenizer: tokenizer of the base.
        factory: function that creates the trainer of a pass.
        arguments: trainer arguments of the user, ``language.trainer_args``.
        autocast: dtype of matrix products, ``language.autocast``.
        name: name of the trainer, ``language.trainer``, for messages.
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
        first_batch = next(data.batches(request.name))
        placement = find_leaf_slots(request, first_batch, model, (key / "probe").generator())
        starts = [t.detach().clone() for _, t in tree.leaves(request.start)]
        parameters = [nn.Parameter(t.clone()) for t in starts]
        # trainers change the configuration, such as whether routers of experts return their logits
        config, generation_config = model.module.config, getattr(model.module, "generation_config", None)
        former_settings = [
            (vars(c), copy.deepcopy(vars(c))) for c in (config, generation_config) if c is not None
        ]
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
                    start_loss = self._compare_losses(placement, first_batch, model, parameters, starts)
                training_pass = self._make_training_pass(
                    request, data, model, round, parameters, micro_batch, Path(folder)
                )
                mean_loss = self._train(training_pass, parameters, starts, start_loss)
                self._compared.add(loss_kind)
        finally:
            for table, former_values in (*former_settings, *former_hooks):
                table.clear()
                table.update(former_values)
        model.set_training(True)
        trained_tree = refill(
            request.start, [p.detach().to(t.dtype) for p, t in zip(parameters, starts, strict=True)]
        )
        return trained_tree, torch.tensor([mean_loss], dtype=torch.float64)

    def _check_request(self, request: Request, data: LocalData) -> None:
        """Raise TaskError if a pass needs something that a trainer does not do."""
        proximal_term = request.proximal_term
        reason = next(
            (
                text
                for text, applies in (
                    ("changes the gradient before each step", request.precondition is not None),
                    ("applies a proximal step after each step", request.prox is not None),
                    (
                        "adds a proximal term",
                        proximal_term is not None
                        and (bool(proximal_term.strength) or proximal_term.linear is not None),
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
        if data.loss.kind != "dpo" and not data.examples.has_token_labels:
            raise TaskError(
                f"language.trainer = {self.name!r} trains on the next token, or on pairs with loss.kind = 'dpo'. Take "
                "trainer = 'own' for other losses, classes and embeddings"
            )
        if data.loss.kind == "dpo" and data.loss.label_smoothing:
            raise TaskError(
                f"language.trainer = {self.name!r}: TRL's DPO has no loss with label_smoothing = "
                f"{data.loss.label_smoothing} as [loss] means it. Set loss.label_smoothing = 0, or take trainer = 'own'"
            )
        if (
            self.factory is make_trl_trainer
            and "label_smoothing_factor" in self.arguments
            and not reads_label_smoothing(self.arguments, data.loss.kind == "dpo")
        ):
            raise ConfigError(
                "language.trainer_args.label_smoothing_factor has no effect here: TRL reads it for texts, with "
                "loss_type = 'nll'. Leave it out"
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
            start_loss = float(task_loss(model.apply({}, batch.x), batch))
        model.set_training(True)
        # both losses use the same operations; only a multiple of a factor may be rounded differently
        if not abs(task_value - placement.value) <= _LOSS_TOLERANCE * max(1.0, abs(placement.value)):
            raise TaskError(
                f"language.trainer = {self.name!r}: the method's loss of a batch is {placement.value:.6g}, and that of the "
                f"tokens alone {task_value:.6g}: it adds terms to the loss, which a trainer would leave out. Take trainer = 'own'"
            )
        return start_loss

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
            advice = "Take trainer = 'own'"
            if getattr(trainer, "aux_loss_enabled", False):
                advice = (
                    "TRL adds a loss of the routers of experts: set language.trainer_args.router_aux_loss_coef = 0, or take "
                    "trainer = 'own'"
                )
            raise TaskError(
                f"language.trainer = {self.name!r}: the loss of a batch is {trl_loss:.6g} by TRL and {loss:.6g} here. {advice}"
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
        max_size = max(map(len, batches))
        size = max_size if micro_batch is None else min(micro_batch, max_size)
        steps = {-(-len(b) // size) for b in batches}
        if len(steps) > 1:
            raise ConfigError(
                f"language.trainer = {self.name!r}: run.micro_batch = {micro_batch} divides the batches of {data.info.title} in "
                f"{min(steps)} to {max(steps)} parts, and a trainer accumulates equally many in every step. Set drop_last = true "
                "in the method, or another micro_batch"
            )
        has_pairs = data.loss.kind == "dpo"
        if has_pairs and any(len(b) > size and len(b) % size for b in batches):
            raise ConfigError(
                f"language.trainer = {self.name!r}: run.micro_batch = {micro_batch} divides a batch of {data.info.title} in "
                "parts of unequal size, and TRL's DPO counts each part alike. Set a micro_batch that divides batch_size, and "
                "drop_last = true in the method"
            )
        seed = int((data.key / "trainer" / request.name).seed() % 2**31)
        device = next(iter(parameters)).device
        defaults = {
            "output_dir": str(folder),
            "max_steps": len(batches),
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": max(steps),
            "learning_rate": request.optimizer.learning_rate(round),
            "max_grad_norm": request.optimizer.clip or 0.0,
            "seed": seed,
            "data_seed": seed,
            "use_cpu": device.type == "cpu",
            "bf16": self.autocast == "bfloat16",
            "fp16": self.autocast == "float16",
            # the base itself recomputes activations if the settings request it
            "activation_checkpointing": False,
            "max_length": None,
            "remove_unused_columns": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **(_list_dpo_arguments(data.loss) if has_pairs else _SFT_ARGUMENTS),
        }
        rows = list_pairs(data.examples) if has_pairs else list_rows(data.examples)
        return TrainingPass(
            model.module,
            self.tokenizer,
            import_library("datasets", "language.trainer").Dataset.from_list(rows),
            batches,
            [{"params": ps, "lr": lr, "weight_decay": wd} for (lr, wd), ps in groups.items()],
            request.optimizer,
            data.info,
            round,
            seed,
            defaults | dict(self.arguments),
            data.examples,
            has_pairs,
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
            training_pass: pass to train.
            parameters: trained parameters in the module.
            starts: initial values of the parameters.
            loss: loss of the first batch, with which TRL's loss is compared; None for no comparison.
        """
        title = f"language.trainer = {self.name!r}, {training_pass.client.title}, round {training_pass.round}"
        try:
            trainer = self.factory(training_pass)
        except _TRAINER_ERRORS as error:
            raise TaskError(f"{title}: the trainer cannot be made: {self._explain_error(error)}") from error
        for p, t in zip(parameters, starts, strict=True):
            if p.dtype != t.dtype:
                # TRL casts the factors of a quantized base to a lower precision; restore them before the first step
                p.data = t.clone()
        trainer_class = import_library("transformers", "language.trainer").Trainer
        if not isinstance(trainer, trainer_class):
            raise TaskError(
                f"{title}: the factory returned a {type(trainer).__name__}, not a transformers.Trainer"
            )
        has_own_loss = any(self.arguments.get(name) for name in LOSS_FIELDS)
        if loss is not None and self.factory is make_trl_trainer and not has_own_loss:
            self._compare_trainers(trainer, training_pass, loss)
        # without a progress bar, this callback would print the logs
        trainer.remove_callback(import_library("transformers", "language.trainer").PrinterCallback)
        try:
            result = trainer.train()
        except _TRAINER_ERRORS as error:
            raise TaskError(f"{title}: the trainer stopped: {self._explain_error(error)}") from error
        if result.global_step != len(training_pass.batches):
            raise TaskError(
                f"{title}: the trainer took {result.global_step} steps and the pass has {len(training_pass.batches)}. Give it "
                "max_steps = given.arguments['max_steps']"
            )
        return float(result.training_loss)


_SFT_ARGUMENTS = {"packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
"""Fields of ``trl.SFTConfig`` alone that a run sets."""


def _list_dpo_arguments(loss: Loss) -> dict[str, Any]:
    """List the fields of ``trl.DPOConfig`` alone that a run sets."""
    # the reference is in the rows; dropout is that of the adapter, as for all other losses
    return {"beta": loss.beta, "precompute_ref_log_probs": True, "disable_dropout": False}


def check_trainer(name: str, arguments: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError for an unknown trainer, for arguments without a trainer, and for arguments without effect.

    Args:
        name: name of the trainer: ``own``, ``trl`` or ``module:function``.
        arguments: setting ``trainer_args``, fields of ``trl.SFTConfig``.
        section: section of the settings, for messages.
    """
    if name not in ("own", "trl") and ":" not in name:
        raise ConfigError(
            f"{section}.trainer is {name!r}; it is 'own', 'trl', or 'module:function' of yours. "
            f"{did_you_mean(name, ('own', 'trl'))}"
        )
    check_trainer_fields(name, arguments, section)
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
    return TrlTrainer(tokenizer, make_trl_trainer, arguments, autocast, name)
