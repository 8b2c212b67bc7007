"""Fields of ``trl.SFTConfig`` and ``trl.DPOConfig`` that ``language.trainer_args`` may set, and those that it must not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import ConfigError, did_you_mean

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
    "disable_dropout": "lora.lora_dropout",
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

LOSS_FIELDS = ("loss_type", "loss_weights", "use_weighting", "f_divergence_type", "label_smoothing_factor")
"""Fields that make TRL's loss another one than that of this package."""

EFFECTIVE_FIELDS = (
    *LOSS_FIELDS,
    *("f_alpha_divergence_coef", "discopop_tau", "router_aux_loss_coef"),
    *("optim", "optim_args", "optim_target_modules"),
    *("pad_to_multiple_of", "activation_offloading", "torch_empty_cache_steps", "tf32"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("use_liger_kernel", "liger_kernel_config"),
    *("disable_tqdm", "logging_strategy", "logging_steps", "logging_first_step", "report_to", "run_name"),
    *("log_level", "debug", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
)
"""Fields with an effect on a pass of TRL's trainers or on its logs; with ``trainer = "trl"`` every other one is refused."""

_REQUIRED_FIELDS = {
    "optim_args": ("optim", "", "optim = 'sgd' or another optimizer that reads it"),
    "optim_target_modules": ("optim", "", "optim = 'galore_adamw' or another optimizer that reads it"),
    "discopop_tau": ("loss_type", "discopop", "loss_type = ['discopop']"),
    "f_alpha_divergence_coef": (
        "f_divergence_type",
        "alpha_divergence",
        "f_divergence_type = 'alpha_divergence'",
    ),
    "liger_kernel_config": ("use_liger_kernel", "True", "use_liger_kernel = true"),
}
"""For some fields: the field without which they have no effect, a text that its value must hold, and what to type."""

_UNSUPPORTED_FIELDS = {
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"),
        "one process trains a client, with the optimizer and the batches of the pass",
    ),
    "logging_nan_inf_filter": "it would hide a loss that is not finite",
    "ld_alpha": "it needs a reference for a part of each response, and the reference here is for whole responses",
}
"""Fields with an effect that a pass cannot have, with the reason."""


def check_trainer_fields(name: str, arguments: Mapping[str, Any], section: str) -> None:
    """Check ``trainer_args`` before any library is imported.

    Args:
        name: name of the trainer: ``trl`` or ``module:function``. A trainer of the user may read any field that the run
            does not set.
        arguments: setting ``trainer_args``.
        section: section of the settings, for messages.

    Raises:
        ConfigError: for a field that the run sets, and with ``trl`` for a field without an effect.
    """
    for field, value in sorted(arguments.items()):
        title = f"{section}.trainer_args.{field}"
        if field in RESERVED_FIELDS:
            raise ConfigError(f"{title}: {RESERVED_FIELDS[field]} says so for all trainers. Set it there")
        if name != "trl":
            continue
        if field in _UNSUPPORTED_FIELDS:
            raise ConfigError(f"{title}: {_UNSUPPORTED_FIELDS[field]}. Leave it out")
        if field not in EFFECTIVE_FIELDS:
            raise ConfigError(
                f"{title} has no effect on a pass, which one process trains on one client's batches. Leave it out, or write a "
                f"trainer of your own that reads it. {did_you_mean(field, EFFECTIVE_FIELDS)}"
            )
        other_field, text, advice = _REQUIRED_FIELDS.get(field, (field, "", ""))
        if other_field not in arguments or text not in str(arguments[other_field]):
            raise ConfigError(
                f"{title} = {value!r} has no effect without {advice}. Set it, too, or leave {field} out"
            )


def reads_label_smoothing(arguments: Mapping[str, Any], has_pairs: bool) -> bool:
    """Whether the trainer of TRL reads ``label_smoothing_factor``: for texts with the loss ``nll`` alone."""
    return not has_pairs and arguments.get("loss_type", "nll") in ("nll", "chunked_nll")
