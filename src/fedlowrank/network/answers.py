"""Validation of the header of a client's answer: its counts and its evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..core.contract import ClientInfo, EngineModel, Pass
from ..results.client_metrics import Metric
from ..results.client_numbers import CLIENT_NUMBERS, PARAMETERS, ROUTE, SPLITS
from ..results.measurements import ClientTable
from .messages import Answer, MessageError
from .validation.uploads import RefusedReplyError

MAX_HEADER = 1 << 20
"""Largest number of characters in the JSON of an answer."""

SLACK = 1000
"""Factor by which a method may compute more, or a model may have more parameters, than a plain one."""

ROUNDING = 1e-9
"""Tolerance by which a metric may exceed its bounds."""


def read_answer(text: str, client: ClientInfo, run: str, round: int) -> Answer:
    """Parse the header of a client's answer to the order of a round; raises RefusedReplyError."""
    if len(text) > MAX_HEADER:
        raise RefusedReplyError(client.id, f"its header takes more than {MAX_HEADER} bytes")
    try:
        answer = Answer.from_json(text)
    except MessageError as error:
        raise RefusedReplyError(client.id, str(error)) from error
    actual_ids, expected_ids = (answer.client, answer.run, answer.round), (client.id, run, round)
    if actual_ids != expected_ids:
        raise RefusedReplyError(client.id, f"it answers {actual_ids} and not {expected_ids}")
    return answer


def steps_of(passes: Mapping[str, Pass], example_count: int) -> dict[str, int]:
    """Number of optimizer steps of each pass over ``example_count`` examples."""
    return {name: sweep.steps_over(example_count) for name, sweep in passes.items()}


def check_counts(
    answer: Answer,
    passes: Mapping[str, Pass],
    pass_names: Sequence[str],
    model: EngineModel,
    example_count: int,
) -> None:
    """Compare a client's counts with those that its examples imply; raises RefusedReplyError.

    Args:
        answer: answer of the client.
        passes: passes of the method, by name; empty if the client was not asked to train.
        pass_names: names of the passes that the method trains, in order.
        model: model of the client.
        example_count: number of training examples that the client registered.
    """
    steps = {name: n * max(1, pass_names.count(name)) for name, n in steps_of(passes, example_count).items()}
    max_steps = sum(steps.values())
    if not 0 <= answer.steps <= max_steps:
        claim = f"it counts {_digits(answer.steps)} optimizer steps"
        raise RefusedReplyError(answer.client, f"{claim}; {example_count} examples make {max_steps} at most")
    rows = example_count + sum(steps[name] * p.batch_size for name, p in passes.items())
    max_flops = SLACK * rows * 6 * weights_of(model) * inputs_of(model) if passes else 0
    if not 0 <= answer.flops <= max_flops:
        claim = f"it counts {_digits(answer.flops)} floating-point operations"
        raise RefusedReplyError(answer.client, f"{claim}; {_digits(max_flops)} are taken at most")
    is_finite = all(map(math.isfinite, answer.losses.values()))
    if not is_finite or not answer.losses.keys() <= passes.keys():
        raise RefusedReplyError(answer.client, "it reports losses that cannot be", not_finite=not is_finite)


def weights_of(model: EngineModel) -> int:
    """Parameter count of a model, frozen parameters included."""
    return max(1, model.parameter_count, sum(p.numel() for p in model.module.parameters()))


def inputs_of(model: EngineModel) -> int:
    """Number of values in one input of a model."""
    example = model.example
    inputs = example.values() if isinstance(example, dict) else [example]
    return max(1, *(int(t[:1].numel()) for t in inputs))


def check_evaluation(
    evaluation: ClientTable, client: ClientInfo, model: EngineModel, metrics: Mapping[str, Metric]
) -> None:
    """Check that an evaluation is complete and its values are possible; raises RefusedReplyError.

    Args:
        evaluation: evaluation of the client.
        client: client that sent the evaluation.
        model: model of the client.
        metrics: metrics that the evaluation must hold besides accuracy and loss, by name.
    """
    numbers = {name: CLIENT_NUMBERS[name] for name in _measured_numbers(evaluation)}
    bounds = {name: number.bounds for name, number in numbers.items()}
    bounds |= {name: (m.bounds[0] - ROUNDING, m.bounds[1] + ROUNDING) for name, m in metrics.items()}
    bounds[PARAMETERS] = (0.0, float(SLACK * weights_of(model)))
    series = evaluation.series()
    keys_by_subject = {
        "scores": [(name, split) for name in series for split in SPLITS],
        "model": [(name, "") for name in series],
        "clusters": [(str(cluster), "") for cluster in range(len(evaluation.series(ROUTE)))],
        "data": [("", split) for split in SPLITS],
    }
    expected = {
        (name, *column_key)
        for name, number in numbers.items()
        for column_key in keys_by_subject[number.about]
    }
    expected |= {(name, *column_key) for name in metrics for column_key in keys_by_subject["scores"]}
    columns = [(column.name, column.series, column.split) for column in evaluation.columns]
    is_valid = (
        evaluation.client_ids == [client.id]
        and len(series) > 0
        and len(columns) == len(expected)
        and set(columns) == expected
        and all(len(column.values) == 1 for column in evaluation.columns)
        and not any(
            value < bounds[column.name][0]
            or value > bounds[column.name][1]
            or (math.isnan(value) and column.name in numbers and not numbers[column.name].may_be_nan)
            for column in evaluation.columns
            for value in column.values
            if value is not None
        )
        and not any(None in column.values for column in evaluation.columns if not column.split)
    )
    if not is_valid:
        raise RefusedReplyError(client.id, "its evaluation is impossible")


def _measured_numbers(evaluation: ClientTable) -> list[str]:
    """Names of the numbers that an evaluation has or should have, besides metrics of the run."""
    column_names = {column.name for column in evaluation.columns}
    return [name for name, number in CLIENT_NUMBERS.items() if number.is_required or name in column_names]


def _digits(number: int) -> str:
    """The number as text, shortened because a client may claim one with thousands of digits."""
    return str(number) if abs(number) < 10**18 else f"{'-' if number < 0 else ''}10^18 or more"
