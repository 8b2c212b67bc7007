"""Result of a finished run: records, models, tables and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ...adapters.deployment import Layout
from ...adapters.state_dict import full_state_dict
from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.tree import Params
from ...models.statistics.client_buffers import StateWithBuffers
from ...results.client_numbers import ACCURACY, LOSS, SPLITS
from ...results.measurements import Measurements, mean_over_clients
from ...results.ranking import find_best
from ...results.records import RoundRecord
from ...training.kept_optimizers import split_optimizers
from ...trust.protection import ClientState as ProtectedClientState
from ...trust.protection import Protected
from ..run import Run
from ..setup.averaged_statistics import AveragedStatistics
from .export import export_model, single_model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        run: run in its last state.
        rounds: records of the rounds; the first one is from before any training.
    """

    run: Run
    rounds: list[RoundRecord]

    @property
    def best_round(self) -> int:
        """Round with the best mean validation accuracy (without an accuracy: loss), the earliest on ties.

        Raises:
            DataError: if no client has validation examples, or if all clients that have some are left out of means.
        """
        best = find_best(record.validation() for record in self.rounds)
        if best is None:
            clients = self.run.federation.clients
            if tested_ids := {i for i, client in enumerate(clients) if len(client.val)}:
                raise DataError(
                    "there is no best round by validation, because all clients with validation examples "
                    f"{self._explain_exclusion(tested_ids)}. Use the last round"
                )
            raise DataError(
                "there is no best round by validation, because no client has validation examples: make the "
                "federation with val=0.1, or use the last round"
            )
        return self.rounds[best].round

    def accuracy(
        self, split: str = "test", series: str | None = None, at: Literal["last", "best"] = "last"
    ) -> list[float | None]:
        """Accuracy of every client after the last round, or after the best one by validation.

        An entry is None for a client without examples in that split, or for one that was not evaluated
        (``evaluate_clients``).

        Args:
            split: name of the split: ``"test"`` or ``"val"``.
            series: name of one of the method's models; by default its headline.
            at: round of the accuracy: ``"last"``, or ``"best"`` for :attr:`best_round`.

        Raises:
            ConfigError: if there is no such split or series.
            DataError: if there is no best round.
        """
        if at not in ("last", "best"):
            raise ConfigError(f"at: {at!r} is no choice. {did_you_mean(str(at), ('last', 'best'))}")
        record = (
            next(r for r in self.rounds if r.round == self.best_round) if at == "best" else self.rounds[-1]
        )
        series_names = record.series()
        if series is not None and series not in series_names:
            raise ConfigError(
                f"{self.run.method.title} has no series {series!r}. {did_you_mean(series, series_names)}"
            )
        if split not in SPLITS:
            raise ConfigError(f"there is no split {split!r}. {did_you_mean(split, SPLITS)}")
        accuracies = record.by_client(ACCURACY, series=series, split=split)
        return [accuracies.get(info.id) for info in self.run.federation.infos]

    def mean_accuracy(
        self, split: str = "test", series: str | None = None, at: Literal["last", "best"] = "last"
    ) -> float:
        """Mean of :meth:`accuracy` over the clients that can train.

        Clients that never train (``unseen``) and hostile ones (``attack``) are left out.

        Args:
            split: name of the split: ``"test"`` or ``"val"``.
            series: name of one of the method's models; by default its headline.
            at: round of the accuracy: ``"last"``, or ``"best"`` for :attr:`best_round`.

        Raises:
            ConfigError: if there is no such split or series.
            DataError: if there is no best round, or if no client has an accuracy because the task is a regression, the
                models are judged by their loss (language models that predict tokens, preference pairs, embeddings, a loss
                of the user's own with scores that are not one for each class) or the split has no examples, or if all
                clients with an accuracy are left out.
        """
        accuracies = self.accuracy(split, series, at)
        mean = mean_over_clients(a for i, a in enumerate(accuracies) if i not in self.run.excluded_from_means)
        if mean is None:
            raise DataError(
                f"there is no mean accuracy, because {self._explain_missing_mean(accuracies, split)}"
            )
        return mean

    def _explain_missing_mean(self, accuracies: Sequence[float | None], split: str) -> str:
        """Explain why a mean of these accuracies does not exist, and what to use instead."""
        losses = "The losses are in the column 'loss' of result.to_frame(last=True)."
        if self.run.federation.clients[0].train.is_regression:
            return f"this is a regression. {losses}"
        evaluated_ids = {i for i, accuracy in enumerate(accuracies) if accuracy is not None}
        has_losses = any(loss is not None for loss in self.rounds[-1].values(LOSS, split=split))
        if not evaluated_ids and has_losses and self.run.federation.loss.is_custom:
            return (
                "the loss is a function of your own, and the models do not make one score for each of the "
                f"{len(self.run.federation.classes)} classes. If they make scores of more classes than the data have, name "
                f"all in from_arrays(classes=...). {losses}"
            )
        if not evaluated_ids and has_losses:
            return (
                "these models are judged by their loss, as language models that predict tokens, preference pairs and "
                f"embeddings are. {losses}"
            )
        if not evaluated_ids:
            return f"no client has examples in the split {split!r}. {losses}"
        return (
            f"all clients with an accuracy in the split {split!r} {self._explain_exclusion(evaluated_ids)}. "
            "result.accuracy() has the accuracy of each client."
        )

    def _explain_exclusion(self, client_ids: set[int]) -> str:
        """Explain why clients are left out of means."""
        hostile_ids = client_ids & set(self.run.hostile)
        reasons = ["are hostile (run.attack)"] if hostile_ids else []
        if client_ids - hostile_ids:
            reasons.append("never train (run.unseen)")
        return f"{' or '.join(reasons)}, and such clients are in no mean"

    @property
    def measurements(self) -> Measurements:
        """All measurements as one table of round, client, series, split, name and value."""
        return Measurements.of(self.rounds, self.run.clients())

    def to_frame(self, *, last: bool = False, series: str | None = None) -> pd.DataFrame:
        """Tabulate the results of every client, one row for each evaluated round, client and split.

        Columns: round, client, client_name (if clients have names), unseen (never trains), hostile, series, split, n
        (examples), accuracy, loss and one for each of ``metrics``; see :func:`...results.frames.client_frame`.

        Args:
            last: whether to keep only the last evaluated round.
            series: name of one of the method's models, or ``"all"``; None for its headline.

        Raises:
            ConfigError: if there is no such series.
        """
        from ...results.frames import client_frame  # pandas is slow to import, as below

        return client_frame(self.measurements, last=last, series=series)

    def rounds_frame(self) -> pd.DataFrame:
        """Tabulate the cost of each round: bytes, operations, seconds; see :func:`...results.frames.rounds_frame`."""
        from ...results.frames import rounds_frame

        return rounds_frame(self.rounds)

    @property
    def server_state(self) -> Any:
        """The method's state of the server, as its hooks get it.

        The clipping norm and averaged statistics, which the package keeps beside it in ``run.state.server``, are left out.
        """
        method, state = self.run.method, self.run.state.server
        while isinstance(method, (Protected, AveragedStatistics)):
            method, state = method.inner, state.inner
        return state

    def client_state(self, client: int | str) -> Any:
        """Get the method's state of a client, as its hooks get it; a fresh one if the client never trained.

        States of optimizers, changed buffers and the residual of compression, which the package keeps beside it in
        ``run.state.clients``, are left out.

        Args:
            client: number or name of the client.

        Raises:
            ConfigError: if the run was over a network, where clients keep their states.
        """
        if self.run.is_deployed:
            raise ConfigError("the server has no states of clients, which keep them in their own folders")
        state, _ = split_optimizers(self.run.state_of(self.run.federation.client(client)))
        if isinstance(state, StateWithBuffers):
            state = state.state
        return state.inner if isinstance(state, ProtectedClientState) else state

    def predict(self, client: int | str, inputs: Any = None, series: str | None = None) -> Tensor:
        """Compute scores of a client's model, by default on its test examples; see :func:`.predictions.predict`."""
        from .predictions import predict

        return predict(self.run, client, inputs, series)

    def predictions(
        self, client: int | str | None = None, split: str = "test", series: str | None = None
    ) -> pd.DataFrame:
        """Tabulate label, prediction and probability of each example; see :func:`.predictions.predictions`."""
        from .predictions import predictions

        return predictions(self.run, client, split, series)

    def confusion(
        self, client: int | str | None = None, split: str = "test", series: str | None = None
    ) -> pd.DataFrame:
        """Confusion matrix of one client or of all in :meth:`mean_accuracy`; see :func:`.predictions.confusion`."""
        from .predictions import confusion

        return confusion(self.run, client, split, series)

    def deploy(self, client: int | str, series: str | None = None, layout: Layout = "small") -> nn.Module:
        """Export the model that a client infers by as a module with factored layers; see :func:`.export.export_model`."""
        return export_model(self.run, client, series, layout)

    def personal(self, client: int | str) -> Params:
        """Get the state dict of the model that a client would use now; load it with ``module.load_state_dict``.

        Trained tensors are copies. Those that are not trained, such as the frozen base of a LoRA model, are those of the
        federation's own module. Load the state into another module, because a federation keeps using the module that it
        was made from.

        Raises:
            ConfigError: if the client infers by several models, such as an ensemble; :meth:`predict` gives its scores.
        """
        info = self.run.federation.client(client)
        params = single_model(self.run, info, self.run.local_model(info))
        copied_params = {name: tensor.detach().clone() for name, tensor in params.items()}
        return full_state_dict(self.run.federation.architectures[info.architecture], copied_params)
