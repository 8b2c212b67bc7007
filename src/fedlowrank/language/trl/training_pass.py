"""The argument of a trainer factory: one pass of one client, with its rows, batches, optimizer and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...core.contract import ClientInfo
from ...core.errors import ConfigError
from ...core.learning.optimizer import AdamW, Optimizer
from ...data.dataset import Examples
from ..optional_packages import import_library


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

        Raises:
            ConfigError: if an argument of the optimizer has no effect.
        """
        o = self.optimizer
        if "optim" in self.arguments:
            optimizer_class, options = self._choose_optimizer(trainer, self.arguments)
            self._check_optimizer_arguments(trainer, _describe_optimizer(optimizer_class, options))
            groups = _split_groups(self.parameters, options.get("params", ()))
            options = {name: value for name, value in options.items() if name not in ("lr", "params")}
            optimizer: torch.optim.Optimizer = optimizer_class(groups, lr=o.lr, **options)
            return optimizer
        if isinstance(o, AdamW):
            return torch.optim.AdamW(self.parameters, betas=(o.beta1, o.beta2), eps=o.eps)
        return torch.optim.SGD(self.parameters, momentum=o.momentum, nesterov=o.nesterov)

    def _choose_optimizer(self, trainer: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Let transformers choose the class of ``optim`` and its options."""
        config = make_config(dict(arguments) | _list_adam_arguments(self.optimizer), self.has_pairs)
        optimizer_class, options = trainer.get_optimizer_cls_and_kwargs(config, self.model)
        return optimizer_class, options

    def _check_optimizer_arguments(self, trainer: Any, description: Any) -> None:
        """Raise ConfigError if the optimizer is the same without one of its arguments."""
        entries = (self.arguments.get("optim_args") or "").replace(" ", "").split(",")
        variants: dict[str, dict[str, Any]] = {
            f"optim_args = {entry!r}": {"optim_args": ",".join(e for e in entries if e != entry) or None}
            for entry in entries
            if entry
        }
        if "optim_target_modules" in self.arguments:
            variants["optim_target_modules"] = {"optim_target_modules": None}
        for text, changes in variants.items():
            try:
                variant = _describe_optimizer(*self._choose_optimizer(trainer, {**self.arguments, **changes}))
            except (ConfigError, ValueError, TypeError, LookupError, AttributeError):
                # the optimizer needs the argument
                continue
            if variant == description:
                raise ConfigError(
                    f"language.trainer_args: {text} changes nothing with optim = {self.arguments['optim']!r}: transformers "
                    "does not read it, or it is the default, or the method sets it (optimizer.lr, optimizer.weight_decay). "
                    "Leave it out"
                )

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Make the learning-rate schedule within the pass."""
        steps, scale = len(self.batches), self.optimizer.local_schedule.scale
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale(step, steps, self.round))


def _describe_optimizer(optimizer_class: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Describe an optimizer by what a pass takes of it: rate and weight decay are those of the method."""
    groups = [(len(g["params"]), _drop_parameters(g)) for g in options.get("params", ())]
    other_options = {
        name: value for name, value in options.items() if name not in ("lr", "params", "weight_decay")
    }
    return optimizer_class, other_options, groups


def _split_groups(
    groups: Sequence[Mapping[str, Any]], special_groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add the options that an optimizer has for some layers, such as the projection of GaLore, to the groups of a pass.

    Args:
        groups: groups of the pass, with learning rates and weight decay.
        special_groups: groups of the optimizer, with its options; it may have none.
    """
    options_by_parameter = {id(p): _drop_parameters(g) for g in special_groups for p in g["params"]}
    split_groups: list[dict[str, Any]] = []
    for group in groups:
        parts: list[tuple[Mapping[str, Any], list[Any]]] = []
        for parameter in group["params"]:
            options = options_by_parameter.get(id(parameter), {})
            members = next((ps for other, ps in parts if other == options), None)
            if members is None:
                parts.append((options, [parameter]))
            else:
                members.append(parameter)
        split_groups += [{**group, **options, "params": ps} for options, ps in parts]
    return split_groups


def _drop_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


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
