"""``language.trainer = "trl"``: the steps of a pass by TRL's ``SFTTrainer``, or by a trainer of the user's own.

Factors are put into the module of PEFT, ``trainer.train()`` is called, and factors are read again; what federated methods do
before and after is the same. It brings what those libraries have and this package has not: further optimizers (``optim =
"adamw_8bit"``, "adafactor"), accumulation, kernels, and whatever a user's own subclass does.

Before the first pass of a kind, the method's loss of one batch is compared with the trainer's: a method that adds terms to the
loss is refused, not trained without them.
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
from ...core.contract.task import Batch, ClientInfo
from ...core.contract.training_request import Request
from ...core.errors import ConfigError, TaskError, did_you_mean
from ...core.learning.batch_losses import task_loss
from ...core.learning.optimizer import AdamW, Optimizer
from ...data.dataset import Examples
from ...models.architecture import Architecture
from ...models.standard import HOOKS
from ...models.stateless import unchanged
from ...training.captured_variables import code_of
from ...training.local_data import LocalData
from ...training.steps import refill
from ..optional import import_library, quiet
from .factors_in_place import Placement, find_places

IGNORED = -100
"""Label of a token that does not count, as transformers has it."""


_NEAR = 1e-5
"""Relative difference of two losses that are the same."""

_ELSEWHERE = {
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
"""Fields of ``trl.SFTConfig`` that the method or the experiment sets, by the setting that counts."""

_OF_TRAINERS = (ValueError, TypeError, ImportError, AttributeError, LookupError, NotImplementedError)
"""What trainers raise for settings that do not fit the model, the machine or each other."""


@dataclass(frozen=True)
class TrainingPass:
    """What a factory of trainers gets: one pass of one client.

    Attributes:
        model: ``peft.PeftModel`` that holds the client's factors; what is to be trained requires a gradient.
        tokenizer: of the base.
        rows: a ``datasets.Dataset`` of the client's texts with ``input_ids`` and ``labels``, -100 where a token does not count.
        batches: rows of each step.
        parameters: what is trained, with its learning rate and weight decay: groups of an optimizer of torch.
        optimizer: settings of the method.
        client: whose pass it is.
        round: counted from 0.
        seed: of the trainer; another one for each client and round.
        arguments: fields of ``trl.SFTConfig``: those of this run, and above them ``language.trainer_args``. ``max_steps`` is
            the number of steps that must be taken.
        examples: the rows as this package has them.
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

    def torch_optimizer(self, trainer: Any) -> torch.optim.Optimizer:
        """The method's optimizer as one of torch; or that of ``trainer_args.optim``, with the method's rates.

        Args:
            trainer: the class of trainers, which knows the optimizers of transformers.
        """
        o = self.optimizer
        if "optim" in self.arguments:
            config = make_config(dict(self.arguments) | _adam_arguments(o))
            made, options = trainer.get_optimizer_cls_and_kwargs(config, self.model)
            options = {name: value for name, value in options.items() if name not in ("lr", "params")}
            found: torch.optim.Optimizer = made(self.parameters, lr=o.lr, **options)
            return found
        if isinstance(o, AdamW):
            return torch.optim.AdamW(self.parameters, betas=(o.beta1, o.beta2), eps=o.eps)
        return torch.optim.SGD(self.parameters, momentum=o.momentum, nesterov=o.nesterov)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """The schedule within the pass."""
        steps, scale = len(self.batches), self.optimizer.local_schedule.scale
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale(step, steps, self.round))


def _adam_arguments(optimizer: Optimizer) -> dict[str, float]:
    """Settings of Adam by the names of transformers."""
    if not isinstance(optimizer, AdamW):
        return {}
    return {
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
    }


def make_config(arguments: Mapping[str, Any]) -> Any:
    """``trl.SFTConfig`` with these fields.

    Raises:
        ConfigError: if it has no such field or refuses a value.
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


def make_sft_trainer(given: TrainingPass) -> Any:
    """TRL's ``SFTTrainer`` with the batches, the optimizer and the schedule of the method."""
    library = import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")

    class OrderedTrainer(library.SFTTrainer):  # type: ignore[misc, name-defined]  # TRL has no types
        """One with the batches of the pass."""

        def get_train_dataloader(self) -> Any:
            """The batches in their order, in parts where they are accumulated."""
            size = self.args.per_device_train_batch_size
            parts = [b[a : a + size] for b in given.batches for a in range(0, len(b), size)]
            loader: Any = torch.utils.data.DataLoader(
                self.train_dataset, batch_sampler=parts, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    optimizer = given.torch_optimizer(library.SFTTrainer)
    return OrderedTrainer(
        model=given.model,
        args=make_config(given.arguments),
        train_dataset=given.rows,
        processing_class=given.tokenizer,
        optimizers=(optimizer, given.scheduler(optimizer)),
    )


@dataclass
class TrlTrainer:
    """Trains passes in the module of an architecture, see :class:`fedlowrank.training.trainer.PassTrainer`.

    Attributes:
        tokenizer: of the base.
        factory: makes the trainer of a pass.
        arguments: ``language.trainer_args``.
        autocast: of the language model.
        name: of the setting, for messages.
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
            TaskError: if the pass is more than the gradient steps of a trainer.
        """
        self._check(request, data)
        key = data.key / "trainer" / request.name
        first = next(data.batches(request.name))
        placement = find_places(request, first, model, (key / "probe").generator())
        starts = [t.detach().clone() for _, t in tree.leaves(request.start)]
        parameters = [nn.Parameter(t.clone()) for t in starts]
        # trainers write into it, as whether routers of experts give their scores
        config, generation = model.module.config, getattr(model.module, "generation_config", None)
        kept = [(vars(c), copy.deepcopy(vars(c))) for c in (config, generation) if c is not None]
        hooks = [
            (table, dict(table))
            for layer in model.module.modules()
            for name in HOOKS
            if (table := getattr(layer, name)) is not None
        ]
        try:
            with (
                unchanged(model.module),
                placement.install(parameters),
                quiet(import_library("transformers", "a language model")),
                tempfile.TemporaryDirectory() as folder,
            ):
                kind = code_of(request.loss), data.loss
                loss = None
                if kind not in self._compared:
                    loss = self._compare(placement, first, model, parameters, starts)
                given = self._describe(request, data, model, round, parameters, micro_batch, Path(folder))
                mean = self._train(given, parameters, starts, loss)
                self._compared.add(kind)
        finally:
            for table, former in (*kept, *hooks):
                table.clear()
                table.update(former)
        model.set_training(True)
        end = refill(request.start, [p.detach().to(t.dtype) for p, t in zip(parameters, starts, strict=True)])
        return end, torch.tensor([mean], dtype=torch.float64)

    def _check(self, request: Request, data: LocalData) -> None:
        """Refuse what a step of a trainer cannot have."""
        term = request.proximal_term
        reason = next(
            (
                text
                for text, is_so in (
                    ("changes the gradient before each step", request.precondition is not None),
                    ("applies a proximal step after each step", request.prox is not None),
                    (
                        "adds a proximal term",
                        term is not None and (bool(term.strength) or term.linear is not None),
                    ),
                    ("keeps the optimizer from round to round (optimizer.keep)", request.kept is not None),
                )
                if is_so
            ),
            None,
        )
        if reason is not None:
            raise TaskError(
                f"language.trainer = {self.name!r}: the method {reason}, which no trainer does. Take trainer = 'own'"
            )
        if not data.examples.tokens:
            raise TaskError(
                f"language.trainer = {self.name!r} trains on the next token alone. Take trainer = 'own' for pairs, classes and "
                "embeddings"
            )

    def _compare(
        self,
        placement: Placement,
        batch: Batch,
        model: Architecture,
        parameters: list[nn.Parameter],
        starts: list[Tensor],
    ) -> float:
        """Compare the method's loss of a batch with that of the task, in the module itself.

        Both are of leaves away from the start, for at the start a penalty may be zero.

        Returns:
            The loss of the batch at the start.
        """
        model.set_training(False)
        with torch.no_grad():
            try:
                for p, t in zip(parameters, placement.probe, strict=True):
                    p.copy_(t)
                found = float(task_loss(model.apply({}, batch.x), batch))
            finally:
                for p, t in zip(parameters, starts, strict=True):
                    p.copy_(t)
            at_start = float(task_loss(model.apply({}, batch.x), batch))
        model.set_training(True)
        # both are the same operations; only a multiple of a factor may be rounded otherwise
        if not abs(found - placement.value) <= _NEAR * max(1.0, abs(placement.value)):
            raise TaskError(
                f"language.trainer = {self.name!r}: the method's loss of a batch is {placement.value:.6g}, and that of the "
                f"tokens alone {found:.6g}: it adds terms to the loss, which a trainer would leave out. Take trainer = 'own'"
            )
        return at_start

    def _explain(self, error: Exception) -> str:
        """An error of a trainer, with the settings that may be its reason."""
        given = ", ".join(sorted(self.arguments))
        hint = f" Leave out what this machine or model does not have of language.trainer_args ({given})."
        return f"{type(error).__name__}: {error}" + (hint if given else "")

    def _compare_trainers(self, made: Any, given: TrainingPass, loss: float) -> None:
        """Compare the loss of the first batch by TRL's trainer, at the start, with that of the experiment."""
        module = given.model
        inputs = made.data_collator([given.rows[i] for i in given.batches[0]])
        module.eval()
        with torch.no_grad():
            device = next(module.parameters()).device
            found = float(made.compute_loss(module, {n: t.to(device) for n, t in inputs.items()}))
        module.train()
        near = 1e-3 if self.autocast == "none" and module.dtype == torch.float32 else 5e-2
        if not abs(found - loss) <= near * max(1.0, abs(loss)):
            raise TaskError(
                f"language.trainer = {self.name!r}: the loss of a batch is {found:.6g} by TRL and {loss:.6g} here. TRL adds a "
                "loss of the routers of experts: set language.trainer_args.router_aux_loss_coef = 0, or take trainer = 'own'"
            )

    def _describe(
        self,
        request: Request,
        data: LocalData,
        model: Architecture,
        round: int,
        parameters: list[nn.Parameter],
        micro_batch: int | None,
        folder: Path,
    ) -> TrainingPass:
        """What the factory gets."""
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
        given: TrainingPass,
        parameters: list[nn.Parameter],
        starts: list[Tensor],
        loss: float | None,
    ) -> float:
        """Make the trainer and let it train; returns the mean loss.

        Args:
            given: the pass.
            parameters: in the module.
            starts: their values.
            loss: of the first batch, to compare TRL's with; None for no comparison.
        """
        where = f"language.trainer = {self.name!r}, {given.client.title}, round {given.round}"
        try:
            made = self.factory(given)
        except _OF_TRAINERS as error:
            raise TaskError(f"{where}: the trainer cannot be made: {self._explain(error)}") from error
        for p, t in zip(parameters, starts, strict=True):
            if p.dtype != t.dtype:
                # TRL rounds the factors of a quantized base; no step was taken yet
                p.data = t.clone()
        trainer_class = import_library("transformers", "language.trainer").Trainer
        if not isinstance(made, trainer_class):
            raise TaskError(
                f"{where}: the factory returned a {type(made).__name__}, not a transformers.Trainer"
            )
        own_loss = self.arguments.keys() & {"loss_type", "label_smoothing_factor"}
        if loss is not None and self.factory is make_sft_trainer and not own_loss:
            self._compare_trainers(made, given, loss)
        # without a progress bar it prints what it logs
        made.remove_callback(import_library("transformers", "language.trainer").PrinterCallback)
        try:
            result = made.train()
        except _OF_TRAINERS as error:
            raise TaskError(f"{where}: the trainer stopped: {self._explain(error)}") from error
        if result.global_step != len(given.batches):
            raise TaskError(
                f"{where}: the trainer took {result.global_step} steps and the pass has {len(given.batches)}. Give it "
                "max_steps = given.arguments['max_steps']"
            )
        return float(result.training_loss)


def list_rows(examples: Examples) -> list[dict[str, list[int]]]:
    """Texts as rows of ``input_ids`` and ``labels`` without padding.

    Raises:
        TaskError: if they have other inputs, such as the samples of packed rows.
    """
    x = examples.x
    assert isinstance(x, dict)
    if others := sorted(x.keys() - {"input_ids", "attention_mask"}):
        raise TaskError(
            f"a trainer of TRL takes texts without {others[0]!r}; set language.packing = false, or trainer = 'own'"
        )
    rows = []
    for tokens, mask, labels in zip(x["input_ids"], x["attention_mask"], examples.y, strict=True):
        # left padding is the tokenizer's, and positions follow the mask
        here = mask.bool()
        rows.append(
            {
                "input_ids": tokens[here].tolist(),
                "labels": torch.where(labels < 0, IGNORED, labels)[here].tolist(),
            }
        )
    return rows


def check_trainer(name: str, arguments: Mapping[str, Any], section: str) -> None:
    """Refuse a trainer that cannot be, and arguments for none.

    Args:
        name: ``own``, ``trl`` or ``module:function``.
        arguments: for it.
        section: of the settings, for messages.
    """
    if name not in ("own", "trl") and ":" not in name:
        raise ConfigError(
            f"{section}.trainer is {name!r}; it is 'own', 'trl', or 'module:function' of yours. "
            f"{did_you_mean(name, ('own', 'trl'))}"
        )
    if taken := sorted(arguments.keys() & _ELSEWHERE.keys()):
        raise ConfigError(
            f"{section}.trainer_args.{taken[0]}: {_ELSEWHERE[taken[0]]} says so for all trainers. Set it there"
        )
    if name == "own" and arguments:
        raise ConfigError(
            f"{section}.trainer_args are read where {section}.trainer is 'trl' or a function of yours; it is 'own'"
        )


def find_trainer(name: str, arguments: Mapping[str, Any], tokenizer: Any, autocast: str) -> TrlTrainer | None:
    """The trainer of that name, or None for this package's own steps; code of the user's own is imported."""
    if name == "own":
        return None
    if name != "trl":
        factory = import_named(name, "language.trainer")
        if not callable(factory):
            raise ConfigError(f"language.trainer: {name!r} is no function")
        return TrlTrainer(tokenizer, factory, arguments, autocast, name)
    import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")
    return TrlTrainer(tokenizer, make_sft_trainer, arguments, autocast, name)
