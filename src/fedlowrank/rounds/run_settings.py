"""The protocol of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..core.arguments.field_checks import CheckedFields
from ..core.errors import ConfigError, did_you_mean
from ..results.client_metrics import check_metric_names
from ..trust.trust_settings import Attack, Clipping, Compression, Privacy, Robust, SecureSums, Trust
from .participation.devices import Devices

LOGGERS = ("tensorboard", "wandb", "mlflow")
"""Loggers that ``run.log`` may name."""

MAX_THREADS = 8192
"""Largest number of torch threads: that of the processors that a Linux kernel supports."""


@dataclass(frozen=True)
class RunSettings(CheckedFields):
    """The protocol of a run, the same for all methods.

    Attributes:
        rounds: number of rounds of communication (T).
        participation: share of the clients that take part in a round (C), in (0, 1].
        sampling: draw of the participants. fixed draws the same number of clients every round; poisson draws every
            client independently with probability C, which suits differential privacy best, so that a round may have
            none; size draws as many as fixed, each in proportion to its training examples, and weights the mean of
            their replies so that it is unbiased; loss draws candidates by size and takes those with the highest
            training loss, whose plain mean is used (Power-of-Choice); see
            :mod:`fedlowrank.rounds.participation.unequal_sampling`. The latter two are refused under privacy, secure
            sums and robust rules.
        candidates: number of candidates (d) when sampling by loss, from the number of clients in a round to all; None
            for twice the clients of a round.
        unseen: share of the clients that never train, in [0, 1), drawn at random; they are evaluated like the others,
            by whatever the method does at a client that never took part. A share above 0 that rounds to no client is
            refused.
        seed: seed of everything random: partition, participants, order of examples, initial values.
        engine: name of the engine: sequential; vectorized (clients of like shapes at once); processes (one per core);
            ray (one worker per core or GPU of a Ray cluster); auto (sequential, vectorized or processes, by a rule);
            wire (every message is encoded as bytes); or flower (Flower's simulation, from an experiment file).
        device: device of the training: cpu, or cuda if torch finds a GPU. Over a network it is the device on which a
            client trains; the server computes on the CPU.
        pixels: storage of images on the device: float32; bytes (a quarter of the memory, the same bits in every step;
            data that are no images of at most 256 values a channel stay float32, and the run says so); or auto (bytes
            on a GPU if possible, float32 on a CPU, which takes three times as long to make a batch of bytes).
        micro_batch: number of examples whose gradient is computed at once, to save memory; larger batches are split
            into parts whose gradients add up to the same. None computes every batch whole. It is refused for a model
            that couples the examples of a batch (batch normalization, and what a trial in training mode detects). A
            loss of your own must be a mean over examples, which is not checked; random draws, such as dropout's, are
            made for each part.
        statistics: source of the batch normalization statistics by which a client infers: local (its own training
            data under its current model); or averaged (running statistics that training updates as in PyTorch, that
            are sent with the model, and that the server averages by n_k, as frameworks do that average
            ``state_dict``). The second is for methods whose clients use the model they are sent.
        client_memory: memory limit of clients' states in MiB; states beyond it that were changed longest ago are
            moved to a temporary folder. None keeps all in memory.
        threads: number of torch threads in this process, at most 8192; a second one makes small models many times
            slower on a busy machine.
        evaluate_every: number of rounds between evaluations; the first and last round are always evaluated. None
            chooses the smallest number for which evaluation takes at most a quarter of the floating-point operations
            of training, but at least 50 evaluations in a run.
        evaluate_clients: number of clients that are evaluated, a random subset that is the same in every round. None
            evaluates all of up to 1,000 clients, and 500 of more.
        metrics: metrics besides accuracy and loss, measured on each client's own examples: macro_f1, weighted_f1,
            micro_f1, mean_iou, balanced_accuracy, auroc, average_precision, top3, top5, ece; in a regression rmse, mae,
            r2; or ``module:function`` of your own, called ``function(scores, labels)`` with NumPy arrays.
        checkpoint_every: number of rounds between checkpoints; the first and last round are always saved. None saves
            once ten seconds have passed since the last checkpoint.
        keep_checkpoints: number of checkpoints that are kept, including the last one; ``fedlowrank resume RUN --round
            N`` goes back to one.
        keep_best: whether to keep the state of the round with the best mean validation accuracy (without an accuracy:
            loss) beside the last, in ``best/``.
        on_nan: action when a client's training meets a NaN or an infinity, or the upload after a finite training
            holds one: stop the run, or drop that client's reply and go on. Under ``privacy`` it does not apply: the
            client sends an update of zeros and keeps its state. Over a network such a reply is always dropped, so
            that no client can stop the run.
        lost_replies: probability that a reply is lost in transit, to study its effect.
        target: test accuracy, in (0, 1], whose cost is reported; by default the report chooses one
            (docs/how-to/report.md).
        adapters: rounds after which the adapter folders of server and clients are written, for language models.
        representations: number of test examples whose representations are kept at the end for pictures; 0 keeps none.
        patience: number of consecutive evaluations without a better mean validation accuracy (without an accuracy: loss)
            after which the run ends; None never ends it early.
        callbacks: functions of your own, ``module:function``, that get the record of every round; a function that
            returns True ends the run.
        log: names of the loggers that write the numbers of each round during the run: tensorboard, wandb, mlflow.
        compression: compression of updates; see :mod:`fedlowrank.trust.trust_settings` for this and the following.
        clipping: clipping of updates.
        privacy: differential privacy of clients.
        robust: rule by which the server reduces the clients' contributions.
        attack: attack of hostile clients, in a simulation.
        secure: secure sums, in which the server sees no single update.
        devices: speeds, bandwidths and availability of the clients, in a simulation; see
            :mod:`fedlowrank.rounds.participation.devices`.
    """

    section: ClassVar[str] = "run"
    passed_to: ClassVar[str] = "simulate"

    rounds: int = 50
    participation: float = 1.0
    sampling: Literal["fixed", "poisson", "size", "loss"] = "fixed"
    candidates: int | None = None
    unseen: float = 0.0
    seed: int = 0
    engine: Literal["sequential", "vectorized", "processes", "ray", "auto", "wire", "flower"] = "auto"
    device: str = "cpu"
    pixels: Literal["auto", "float32", "bytes"] = "auto"
    micro_batch: int | None = None
    statistics: Literal["local", "averaged"] = "local"
    client_memory: int | None = None
    threads: int = 1
    evaluate_every: int | None = None
    evaluate_clients: int | None = None
    metrics: tuple[str, ...] = ()
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    keep_best: bool = False
    on_nan: Literal["stop", "drop"] = "stop"
    lost_replies: float = 0.0
    target: float | None = None
    adapters: tuple[int, ...] = ()
    representations: int = 1000
    patience: int | None = None
    callbacks: tuple[str, ...] = ()
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    compression: Compression = Compression()
    clipping: Clipping = Clipping()
    privacy: Privacy = Privacy()
    robust: Robust = Robust()
    attack: Attack = Attack()
    secure: SecureSums = SecureSums()
    devices: Devices = Devices()

    @property
    def trust(self) -> Trust:
        """Settings of the steps that updates pass between clients and server."""
        return Trust(self.compression, self.clipping, self.privacy, self.robust, self.attack, self.secure)

    def __post_init__(self) -> None:
        # refuses incompatible settings
        _ = self.trust
        # Python code passes lists
        object.__setattr__(self, "metrics", check_metric_names(self.metrics))
        counts = (
            "rounds", "threads", "evaluate_every", "evaluate_clients", "checkpoint_every", "keep_checkpoints",
            "patience", "candidates",
        )  # fmt: skip
        for name in counts:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be >= 1; it is {getattr(self, name)}")
        if self.threads > MAX_THREADS:
            raise ConfigError(
                f"run.threads must be <= {MAX_THREADS}; it is {self.threads}. Set the number of cores that the run may use"
            )
        if self.micro_batch is not None and (self.micro_batch < 1 or self.engine == "vectorized"):
            raise ConfigError(
                "run.micro_batch must be >= 1, and clients at once (engine 'vectorized') take batches "
                f"whole; it is {self.micro_batch} with engine {self.engine!r}"
            )
        if self.client_memory is not None and self.client_memory < 0:
            raise ConfigError(f"run.client_memory is a number of MiB, at least 0; it is {self.client_memory}")
        if not 0 < self.participation <= 1:
            raise ConfigError(
                f"run.participation is the share of clients in a round, in (0, 1]; it is {self.participation}"
            )
        if not 0 <= self.unseen < 1:
            raise ConfigError(
                f"run.unseen is the share of clients that never train, in [0, 1); it is {self.unseen}"
            )
        if self.representations < 0:
            raise ConfigError(f"run.representations must be >= 0; it is {self.representations}")
        if not 0 <= self.lost_replies < 1:
            raise ConfigError(f"run.lost_replies is a probability in [0, 1); it is {self.lost_replies}")
        _check_sampling(self)
        _check_names(self)
        _check_device(self.device)
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"run.target is an accuracy in (0, 1], such as 0.9; it is {self.target}")


def _check_sampling(settings: RunSettings) -> None:
    if settings.candidates is not None and settings.sampling != "loss":
        raise ConfigError(
            f"run.candidates = {settings.candidates} does nothing with run.sampling = {settings.sampling!r}: set run.sampling "
            "to 'loss', or leave run.candidates out"
        )
    if settings.sampling in ("fixed", "poisson"):
        return
    conflicts = (
        (
            settings.privacy.kind != "none",
            "privacy",
            "the accountant knows draws that do not depend on clients' data",
        ),
        (settings.secure.on, "secure", "the server would see sizes and losses of single clients"),
        (
            settings.robust.rule != "mean",
            "robust",
            "a client could have itself drawn by the size or loss that it reports",
        ),
    )
    for is_set, section, reason in conflicts:
        if is_set:
            raise ConfigError(
                f"run.sampling = {settings.sampling!r} does not go with run.{section}, because {reason}. Set run.sampling to "
                f"'fixed' or 'poisson', or leave run.{section} out"
            )


def _check_names(settings: RunSettings) -> None:
    for name in settings.callbacks:
        if not all(name.partition(":")):
            raise ConfigError(f"run.callbacks: a callback is named module:function; it is {name!r}")
    for name in settings.log:
        if name not in LOGGERS:
            raise ConfigError(f"run.log: there is no {name!r}. {did_you_mean(name, LOGGERS)}")


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(
            f"run.device is {device!r}; it must be 'cpu', 'cuda', or 'cuda:1' and so on for a further GPU"
        )
    if not torch.cuda.is_available():
        reason = (
            "this build of torch is without CUDA"
            if torch.version.cuda is None
            else "nvidia-smi shows whether the driver works"
        )
        raise ConfigError(
            f"run.device is {device!r}, but torch {torch.__version__} finds no GPU here ({reason}). Set "
            "run.device=cpu."
        )
    if int(device.partition(":")[2] or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"run.device is {device!r}, but torch finds {count} GPU here, cuda:0 to cuda:{count - 1}"
        )
