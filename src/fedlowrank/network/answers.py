"""Whether what a client says beside its upload can be true: what it counted, and what its models are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..core.method import ClientInfo, Pass
from ..core.model import Model
from ..simulation.evaluation import SPLITS, ClientEvaluation
from .messages import Answer, MessageError
from .validation.uploads import Refused

HEADER = 1 << 20
"""Characters of the JSON of an answer at most."""

SLACK = 1000
"""How often a method may compute more, or a model hold more numbers, than a plain one does."""


def read_answer(text: str, client: ClientInfo, run: str, round: int) -> Answer:
    """The answer in these words.

    Raises:
        Refused: if it is none, or answers something else.
    """
    if len(text) > HEADER:
        raise Refused(client.id, "", f"its words take more than {HEADER} bytes")
    try:
        answer = Answer.from_json(text)
    except MessageError as error:
        raise Refused(client.id, "", str(error)) from error
    if (answer.client, answer.run, answer.round) != (client.id, run, round):
        found, wanted = (answer.client, answer.run, answer.round), (client.id, run, round)
        raise Refused(client.id, "", f"it answers {found} and not {wanted}")
    return answer


def steps_of(passes: Mapping[str, Pass], examples: int) -> dict[str, int]:
    """The optimizer steps of each pass over so many examples."""
    whole = {name: p.epochs * -(-examples // p.batch_size) for name, p in passes.items()}
    return {
        name: n if passes[name].steps is None else min(n, passes[name].steps or 0)
        for name, n in whole.items()
    }


def check_counts(
    answer: Answer, passes: Mapping[str, Pass], trained: Sequence[str], model: Model, examples: int
) -> None:
    """Compare what a client counted with what its examples imply.

    Args:
        answer: of the client.
        passes: of the method; none where the client was not asked to train.
        trained: the passes in which the method trains, each as often as it does.
        model: of the client.
        examples: training examples that the client registered.

    Raises:
        Refused: if it cannot have counted that.
    """
    steps = steps_of(passes, examples)
    most = sum(steps[name] * max(1, trained.count(name)) for name in steps)
    if not 0 <= answer.steps <= most:
        raise Refused(
            answer.client,
            "",
            f"it counts {_short(answer.steps)} optimizer steps; {examples} examples make {most} at most",
        )
    rows = examples + sum(
        steps[name] * max(1, trained.count(name)) * p.batch_size for name, p in passes.items()
    )
    flops = SLACK * rows * 6 * weights_of(model) * inputs_of(model) if passes else 0
    if not 0 <= answer.flops <= flops:
        counted = (
            f"it counts {_short(answer.flops)} floating-point operations; {_short(flops)} are taken at most"
        )
        raise Refused(answer.client, "", counted)
    if not answer.losses.keys() <= passes.keys() or not all(map(math.isfinite, answer.losses.values())):
        raise Refused(answer.client, "", "it reports losses that cannot be")


def weights_of(model: Model) -> int:
    """All numbers in a model's weights, frozen ones included."""
    return max(1, model.parameters, sum(p.numel() for p in model.module.parameters()))


def inputs_of(model: Model) -> int:
    """Numbers in one input of a model."""
    example = model.example
    sizes = [int(t[:1].numel()) for t in (example.values() if isinstance(example, dict) else [example])]
    return max(1, *sizes)


def check_evaluation(found: ClientEvaluation, client: ClientInfo, model: Model) -> None:
    """Whether an evaluation says of each of its series what can be said of one.

    Raises:
        Refused: if it does not.
    """
    accuracy, risk, parameters = found.accuracy, found.risk, found.parameters
    sound = (
        len(accuracy) > 0
        and accuracy.keys() == risk.keys() == parameters.keys()
        and all(table.keys() == set(SPLITS) for table in (*accuracy.values(), *risk.values()))
        and all(v is None or 0 <= v <= 1 for table in accuracy.values() for v in table.values())
        and all(0 <= n <= SLACK * weights_of(model) for n in parameters.values())
        # a loss and a route may be NaN, of a model whose training diverged
        and not any(p < 0 or p > 1 for p in found.routes or ())
    )
    if not sound:
        raise Refused(client.id, "", "what it says its models are worth cannot be")


def _short(number: int) -> str:
    """A number of which a client may say that it has thousands of digits."""
    return str(number) if abs(number) < 10**18 else f"{'-' if number < 0 else ''}10^18 or more"
