"""Makes the trainers of TRL for a pass: ``SFTTrainer`` for texts, ``DPOTrainer`` for pairs of responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..optional_packages import import_library
from .training_pass import TrainingPass, make_config


def make_trl_trainer(training_pass: TrainingPass) -> Any:
    """Make TRL's trainer for the rows of a pass, with the batches, the optimizer and the schedule of the method."""
    make = make_dpo_trainer if training_pass.has_pairs else make_sft_trainer
    return make(training_pass)


def make_sft_trainer(training_pass: TrainingPass) -> Any:
    """Make TRL's ``SFTTrainer`` with the batches, the optimizer and the schedule of the method."""
    library = _import_trl()

    class OrderedSftTrainer(library.SFTTrainer):  # type: ignore[misc, name-defined]  # TRL has no types
        """An ``SFTTrainer`` that uses the batches of the pass."""

        def get_train_dataloader(self) -> Any:
            """Make a loader of the batches in their order, split into parts for gradient accumulation."""
            return _load_batches(self, training_pass)

    return OrderedSftTrainer(**_list_arguments(training_pass, library.SFTTrainer))


def make_dpo_trainer(training_pass: TrainingPass) -> Any:
    """Make TRL's ``DPOTrainer`` with the batches, the optimizer and the schedule of the method.

    The reference is the model that training starts from in the first round. Its log-probabilities are in the rows. TRL would take
    a copy of the factors at the beginning of the pass, which is another reference from the second round on.
    """
    library = _import_trl()
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    class MaskedCollator(DataCollatorForPreference):
        """TRL's collator, for responses with tokens that do not count."""

        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            """Make a batch ``[2 b, T]``: the chosen responses, then the rejected ones."""
            batch: dict[str, Any] = super().torch_call(examples)
            masks = [[0] * len(e["prompt_ids"]) + e[f"{side}_mask"] for side in SIDES for e in examples]
            width = batch["completion_mask"].shape[1]
            batch["completion_mask"] = torch.tensor([mask + [0] * (width - len(mask)) for mask in masks])
            return batch

    class OrderedDpoTrainer(library.DPOTrainer):  # type: ignore[misc, name-defined]  # TRL has no types
        """A ``DPOTrainer`` that uses the batches and the references of the pass."""

        def get_train_dataloader(self) -> Any:
            """Make a loader of the batches in their order, split into parts for gradient accumulation."""
            return _load_batches(self, training_pass)

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            """Return the rows unchanged, because they are already tokens."""
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
            """Return the rows unchanged, because they already have the reference."""
            return dataset

    arguments = _list_arguments(training_pass, library.DPOTrainer)
    return OrderedDpoTrainer(
        **arguments,
        ref_model=_NoModel(training_pass.model.config),
        data_collator=MaskedCollator(
            pad_token_id=training_pass.tokenizer.pad_token_id,
            pad_to_multiple_of=arguments["args"].pad_to_multiple_of,
        ),
    )


SIDES = ("chosen", "rejected")
"""The two responses of a pair, in the order of TRL's batches."""


class _NoModel(nn.Module):
    """A placeholder of TRL's reference model, so that TRL adds no adapter to the trained model as a reference."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise AssertionError: the log-probabilities of the reference are in the rows."""
        raise AssertionError("the reference is in the rows")


def _import_trl() -> Any:
    return import_library("trl", "language.trainer = 'trl'", "'fedlowrank[trl]'")


def _list_arguments(training_pass: TrainingPass, trainer_class: Any) -> dict[str, Any]:
    """List the arguments that both trainers have."""
    optimizer = training_pass.make_torch_optimizer(trainer_class)
    return {
        "model": training_pass.model,
        "args": make_config(training_pass.arguments, training_pass.has_pairs),
        "train_dataset": training_pass.rows,
        "processing_class": training_pass.tokenizer,
        "optimizers": (optimizer, training_pass.make_scheduler(optimizer)),
    }


def _load_batches(trainer: Any, training_pass: TrainingPass) -> Any:
    """Make a loader of the batches of a pass in their order, split into parts for gradient accumulation."""
    size = trainer.args.per_device_train_batch_size
    micro_batches = [b[a : a + size] for b in training_pass.batches for a in range(0, len(b), size)]
    loader: Any = torch.utils.data.DataLoader(
        trainer.train_dataset, batch_sampler=micro_batches, collate_fn=trainer.data_collator
    )
    return trainer.accelerator.prepare(loader)
