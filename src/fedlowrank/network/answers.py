"""Validation of the header of a client's answer: its counts and its evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..core.contract.method import ClientInfo, Pass
from ..core.contract.model import Model
from ..results.client_metrics import Metric
from ..results.evaluation import SPLITS
from ..results.measurements import ACCURACIES_OF_TEXTS, ACCURACY, LOSS, PARAMETERS, ROUTE, Block
from .messages import Answer, MessageError
from .validation.uploads import RefusedReplyError

MAX_HEADER = 1 << 20
"""Characters of the JSON of an answer."""

SLACK = 1000
"""Factor by which a method may compute more, or a model have more parameters, than a plain one."""

ROUNDING = 1e-9
"""By which a metric may exceed its bounds."""


def read_answer(text: str, client: ClientInfo, run: str, round: int) -> Answer:
    """Parse the header of this client's answer to this round's order; raises RefusedReplyError."""
    if len(text) > MAX_HEADER:
        raise RefusedReplyError(client.id, f"its header takes more than {MAX_HEADER} bytes")
    try:
        answer = Answer.from_json(text)
    except MessageError as error:
        raise RefusedReplyError(client.id, str(error)) from error
    found, wanted = (answer.client, answer.run, answer.round), (client.id, run, round)
    if found != wanted:
        raise RefusedReplyError(client.id, f"it answers {found} and not {wanted}")
    return answer


def steps_of(passes: Mapping[str, Pass], examples: int) -> dict[str, int]:
    """The optimizer steps of each pass over so many examples."""
    return {name: sweep.steps_over(examples) for name, sweep in passes.items()}


def check_counts(
    answer: Answer, passes: Mapping[str, Pass], trained: Sequence[str], model: Model, examples: int
) -> None:
    """Compare what a client counted with what its examples imply; raises RefusedReplyError.

    Args:
        answer: of the client.
        passes: of the method; empty if the client was not asked to train.
        trained: names of the passes that the method trains, in order.
        model: of the client.
        examples: that the client registered for training.
    """
    steps = {name: n * max(1, trained.count(name)) for name, n in steps_of(passes, examples).items()}
    max_steps = sum(steps.values())
    if not 0 <= answer.steps <= max_steps:
        counted = f"it counts {_digits(answer.steps)} optimizer steps"
        raise RefusedReplyError(answer.client, f"{counted}; {examples} examples make {max_steps} at most")
    rows = examples + sum(steps[name] * p.batch_size for name, p in passes.items())
    max_flops = SLACK * rows * 6 * weights_of(model) * inputs_of(model) if passes else 0
    if not 0 <= answer.flops <= max_flops:
        counted = f"it counts {_digits(answer.flops)} floating-point operations"
        raise RefusedReplyError(answer.client, f"{counted}; {_digits(max_flops)} are taken at most")
    is_finite = all(map(math.isfinite, answer.losses.values()))
    if not is_finite or not answer.losses.keys() <= passes.keys():
        raise RefusedReplyError(answer.client, "it reports losses that cannot be", not_finite=not is_finite)


def weights_of(model: Model) -> int:
    """Parameter count of a model, frozen parameters included."""
    return max(1, model.parameters, sum(p.numel() for p in model.module.parameters()))


def inputs_of(model: Model) -> int:
    """Numbers in one input of a model."""
    example = model.example
    inputs = example.values() if isinstance(example, dict) else [example]
    return max(1, *(int(t[:1].numel()) for t in inputs))


def check_evaluation(
    evaluation: Block, client: ClientInfo, model: Model, metrics: Mapping[str, Metric]
) -> None:
    """Check that an evaluation is complete and its values are possible; raises RefusedReplyError.

    Args:
        evaluation: of the client.
        client: that sent it.
        model: of the client.
        metrics: that it must hold besides accuracy and loss, by name.
    """
    bounds = {
        ACCURACY: (0.0, 1.0),
        **dict.fromkeys(ACCURACIES_OF_TEXTS, (0.0, 1.0)),
        PARAMETERS: (0.0, float(SLACK * weights_of(model))),
        # a loss, a metric and a route may be NaN, of a model whose training diverged
        LOSS: (-math.inf, math.inf),
        ROUTE: (0.0, 1.0),
        **{name: (m.bounds[0] - ROUNDING, m.bounds[1] + ROUNDING) for name, m in metrics.items()},
    }
    never_nan = (ACCURACY, *ACCURACIES_OF_TEXTS, PARAMETERS)
    named = {c.name for c in evaluation.columns}
    further = [*metrics, *(name for name in ACCURACIES_OF_TEXTS if name in named)]
    series = evaluation.series()
    found = [(column.name, column.series, column.split) for column in evaluation.columns]
    expected = {
        (name, own, split) for name in (ACCURACY, LOSS, *further) for own in series for split in SPLITS
    }
    expected |= {(PARAMETERS, own, "") for own in series}
    expected |= {(ROUTE, str(cluster), "") for cluster in range(len(evaluation.series(ROUTE)))}
    is_valid = (
        evaluation.clients == [client.id]
        and len(series) > 0
        and len(found) == len(expected)
        and set(found) == expected
        and all(len(column.values) == 1 for column in evaluation.columns)
        and not any(
            value < bounds[column.name][0]
            or value > bounds[column.name][1]
            or (math.isnan(value) and column.name in never_nan)
            for column in evaluation.columns
            for value in column.values
            if value is not None
        )
        and not any(None in column.values for column in evaluation.columns if not column.split)
    )
    if not is_valid:
        raise RefusedReplyError(client.id, "its evaluation is impossible")


def _digits(number: int) -> str:
    """The number, shortened: a client may claim one of thousands of digits."""
    return str(number) if abs(number) < 10**18 else f"{'-' if number < 0 else ''}10^18 or more"
