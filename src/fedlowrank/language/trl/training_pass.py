"""The argument of a trainer factory: one pass of one client, with its rows, batches, optimizer and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...core.contract import ClientInfo
from ...core.errors import ConfigError
from ...core.learning.optimizer import AdamW, Optimizer
from ...data.dataset import Examples
from ..optional_packages import import_library

RESERVED_FIELDS = {
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
    "beta": "loss.beta",
    "label_smoothing": "loss.label_smoothing",
    **dict.fromkeys(
        (
            *("precompute_ref_log_probs", "precompute_ref_batch_size"),
            *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        ),
        "loss.kind = 'dpo', with the model that training starts from as the reference,",
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
"""Fields of ``trl.SFTConfig`` and ``trl.DPOConfig`` that the user must not set, with the setting that sets each."""


@dataclass(frozen=True)
class TrainingPass:
    """One pass of one client, the argument of a trainer factory.

    Attributes:
        model: ``peft.PeftModel`` that holds the client's factors; trained parameters require a gradient.
        tokenizer: tokenizer of the base.
        rows: texts of the client, a ``datasets.Dataset`` with ``input_ids`` and ``labels``, -100 where a token does
            not count; for pairs of responses it has the columns of :func:`.trainer_rows.list_pairs`.
        batches: row indices of the batch of each step.
        parameters: parameter groups for a torch optimizer: trained parameters with learning rate and weight decay.
        optimizer: optimizer settings of the method.
        client: client of the pass.
        round: index of the round, from 0.
        seed: seed of the trainer, different for each client and round.
        arguments: fields of ``trl.SFTConfig``, or of ``trl.DPOConfig`` for pairs of responses: the fields that this run sets,
            updated by ``language.trainer_args``. ``max_steps`` is the number of steps that must be taken.
        examples: rows as examples of this package.
        has_pairs: whether a row is a pair of responses.
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
    has_pairs: bool = False

    def make_torch_optimizer(self, trainer: Any) -> torch.optim.Optimizer:
        """Make the method's optimizer in torch; or the optimizer ``trainer_args.optim`` with the method's learning rates.

        Args:
            trainer: trainer class, which creates the optimizers of transformers.
        """
        o = self.optimizer
        if "optim" in self.arguments:
            config = make_config(dict(self.arguments) | _list_adam_arguments(o), self.has_pairs)
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


def make_config(arguments: Mapping[str, Any], has_pairs: bool = False) -> Any:
    """Make a ``trl.SFTConfig``, or a ``trl.DPOConfig`` for pairs of responses, from its fields.

    Raises:
        ConfigError: if TRL's class lacks a field or rejects a value.
    """
    library = import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")
    config_class = library.DPOConfig if has_pairs else library.SFTConfig
    name = f"trl.{config_class.__name__}"
    field_names = {f.name for f in fields(config_class)}
    if unknown_fields := sorted(arguments.keys() - field_names):
        raise ConfigError(
            f"language.trainer_args: {name} has no field {unknown_fields[0]!r} (trl {library.__version__})"
        )
    try:
        return config_class(**arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"language.trainer_args: {name} refuses them: {error}") from error
