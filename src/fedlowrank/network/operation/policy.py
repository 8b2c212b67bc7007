"""A site's policy: conditions that an experiment must satisfy before the site takes part.

``fedlowrank join --policy FILE.toml`` compares the experiment with it before anything is sent, and writes the policy and
its digest into the client's folder. The policy then applies to later joins with that folder, with or without the option.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...config.assembly import Shares
from ...config.experiment import ExperimentConfig
from ...config.reading.parsing import build
from ...config.reading.toml_files import read_toml
from ...core import tree
from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import CheckpointError, ConfigError
from ...core.io.atomic_files import as_checkpoint_error
from ...core.io.text import list_first
from ...methods import METHODS
from ...rounds.setup.averaged_statistics import average_statistics
from ...storage.digest import read_sealed, write_sealed
from ...training.tracing import trace_upload
from ..client import ClientRuntime, prepare
from ..site.site_settings import SiteSettings

POLICY_FILE = "policy.json"
"""Name of the policy in a client's folder."""

_PRIVACY_ORDER = ("none", "central", "local")


@dataclass(frozen=True)
class Policy(CheckedFields):
    """Conditions that an experiment must satisfy.

    Attributes:
        methods: built-in methods and classes ``module:Class`` that may run, alone or as a variant; empty for any.
        parts: patterns of the tensors that may leave the site in a reply, such as ``"*lora*"`` or ``"head.*"``; they match
            the paths that a refusal lists.
        evaluation: whether the site's accuracies and losses may leave it.
        min_examples: smallest number of training examples with which the site takes part.
        min_clients: smallest number of clients of a federation.
        max_rounds: largest number of rounds of a run; None for any number.
        secure: whether the server may learn only sums (run.secure.on).
        privacy: weakest kind of run.privacy that is allowed; local is stronger than central.
        max_epsilon: largest run.privacy.epsilon; None for any.
        max_delta: largest run.privacy.delta; None for any.
    """

    section = "policy"

    methods: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("*",)
    evaluation: bool = True
    min_examples: int = 1
    min_clients: int = 1
    max_rounds: int | None = None
    secure: bool = False
    privacy: Literal["none", "central", "local"] = "none"
    max_epsilon: float | None = None
    max_delta: float | None = None

    def __post_init__(self) -> None:
        bounds = {"min_examples": ">= 1", "min_clients": ">= 1", "max_rounds": ">= 1", "max_epsilon": "> 0"}
        check_bounds(self, {**bounds, "max_delta": "> 0 and < 1"}, "policy")
        for name in self.methods:
            if name not in METHODS and ":" not in name:
                raise ConfigError(
                    f"policy.methods: there is no method {name!r}; see `fedlowrank list methods`"
                )

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file; raises ConfigError if it cannot be read or is invalid."""
        return build(cls, read_toml(path, "policy file"), "policy")

    @classmethod
    def of_folder(cls, folder: Path) -> Policy | None:
        """Read the policy of a client's folder; None if there is none; raises CheckpointError if it is damaged."""
        path = folder / POLICY_FILE
        if not path.exists():
            return None
        try:
            return build(cls, read_sealed(path)["policy"], "policy")
        except (KeyError, ConfigError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    @property
    def digest(self) -> str:
        """BLAKE2b of the policy's fields, 16 bytes."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def store(self, folder: Path) -> None:
        """Write the policy into a client's folder."""
        write_sealed(folder / POLICY_FILE, {"policy": dataclasses.asdict(self), "policy_digest": self.digest})

    def find_violations(
        self,
        experiment: ExperimentConfig,
        client_count: int,
        example_count: int,
        list_paths: Callable[[], Iterable[str]],
        sends_evaluation: bool = True,
    ) -> list[str]:
        """List the conditions that an experiment violates.

        Args:
            experiment: experiment with the method that runs.
            client_count: number of clients of the federation.
            example_count: number of training examples at this site.
            list_paths: function that lists the paths of all tensors of a reply; called if the policy names parts.
            sends_evaluation: whether the client sends evaluations if it is asked for them.
        """
        run, name = experiment.run, experiment.default_method
        # the file's author chose the name of a variant
        method = experiment.base_method(name)
        violations = []
        if self.methods and method not in self.methods:
            variant_text = "" if name == method else f" (as the variant {name})"
            violations.append(f"methods: {method}{variant_text} is not among {', '.join(self.methods)}")
        if self.max_rounds is not None and run.rounds > self.max_rounds:
            violations.append(f"max_rounds: the run has {run.rounds} rounds, above {self.max_rounds}")
        if example_count < self.min_examples:
            violations.append(
                f"min_examples: the site has {example_count} training examples, below {self.min_examples}"
            )
        if client_count < self.min_clients:
            violations.append(
                f"min_clients: the federation has {client_count} clients, below {self.min_clients}"
            )
        if self.secure and not run.secure.on:
            violations.append("secure: the server would see this site's update; run.secure.on is needed")
        violations += self._find_privacy_violations(experiment)
        if not self.evaluation and sends_evaluation and run.privacy.kind == "none" and not run.secure.on:
            violations.append("evaluation: accuracies and losses would leave the site")
        if self.parts != ("*",):
            patterns = [p.lstrip("/") for p in self.parts]
            paths = [u for u in list_paths() if not any(fnmatch.fnmatchcase(u, p) for p in patterns)]
            if paths:
                violations.append(
                    f"parts: {list_first(paths, 5)} would leave the site, and no pattern of {list(self.parts)} allows it"
                )
        return violations

    def _find_privacy_violations(self, experiment: ExperimentConfig) -> list[str]:
        privacy, violations = experiment.run.privacy, []
        if _PRIVACY_ORDER.index(privacy.kind) < _PRIVACY_ORDER.index(self.privacy):
            violations.append(
                f"privacy: run.privacy.kind is {privacy.kind}; {self.privacy} is needed at least"
            )
        for name, limit in (("epsilon", self.max_epsilon), ("delta", self.max_delta)):
            value = getattr(privacy, name)
            if limit is None:
                continue
            if privacy.kind == "none" or value is None:
                violations.append(f"max_{name}: run.privacy sets no {name}; at most {limit:g} is allowed")
            elif value > limit:
                violations.append(f"max_{name}: run.privacy.{name} is {value:g}, above {limit:g}")
        return violations


def preview_uploads(
    folder: Path, experiment: ExperimentConfig, client_id: int, shares: Shares, site: SiteSettings
) -> list[str]:
    """Result of :func:`list_upload_paths` for a client whose folder has not been prepared yet.

    Args:
        folder: folder of the client; a temporary folder in it is removed at the end.
        experiment: experiment in which the client would take part.
        client_id: identifier of the client.
        shares: examples of all clients.
        site: permissions of the server at this client.
    """
    with (
        as_checkpoint_error(f"cannot write {folder}"),
        tempfile.TemporaryDirectory(dir=folder) as trial_folder,
    ):
        prepare(Path(trial_folder), experiment, client_id, shares, site, sketch=())
        return list_upload_paths(Path(trial_folder))


def list_upload_paths(folder: Path) -> list[str]:
    """List the paths of all tensors that a client sends in a reply, without training.

    Args:
        folder: folder of the client.
    """
    runtime = ClientRuntime(folder)
    run, federation = runtime.experiment.run, runtime.federation
    task, info = federation.task(run.rounds), federation.infos[runtime.client]
    method: Any = average_statistics(
        runtime.experiment.build_method(runtime.experiment.default_method), task, run
    )
    down = tree.zeros_like(method.download(method.server_init(task), info))
    upload, _ = trace_upload(method, task, info, down)
    return [path.lstrip("/") for path, _ in tree.leaves(upload)]


def raise_violations(policy: Policy, violations: Sequence[str]) -> None:
    """Raise ConfigError if there are violations of a policy."""
    if violations:
        raise ConfigError(
            f"the policy (digest {policy.digest}) does not allow this experiment, and nothing was sent:\n"
            + "\n".join(f"  {v}" for v in violations)
        )
