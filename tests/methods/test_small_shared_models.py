"""FML and FedKD share a small model: which one it is, and that its dropout acts at clients of other models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlowrank.core.errors import TaskError
from fedlowrank.data.federation import Federation
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fml import FML

from .setting import (
    CLASSES,
    SIZES,
    SLOW_LOCAL,
    WIDTH,
    Net,
    federate_two_models,
    make_arrays,
    prepare_run,
    run_rounds,
)


def test_an_unknown_small_model_is_refused() -> None:
    for method in (FML(meme="nope"), FedKD(mentee="nope")):
        with pytest.raises(TaskError, match="nope"):
            prepare_run(method, federate_two_models())


def test_the_small_model_is_the_one_with_the_fewest_parameters() -> None:
    federation = federate_two_models()
    assert (
        federation.architectures["small"].parameter_count < federation.architectures["deep"].parameter_count
    )
    assert sorted(prepare_run(FML(), federation).state.server) == sorted(
        federation.architectures["small"].initial
    )
    assert sorted(prepare_run(FedKD(), federation).state.server.mentee) == sorted(
        federation.architectures["small"].initial
    )


class WithDropout(Net):
    """A model with dropout between its representation's layers."""

    def __init__(self, p: float) -> None:
        super().__init__(WIDTH)
        self.body.append(nn.Dropout(p))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method", [FML(meme="wet", **SLOW_LOCAL), FedKD(mentee="wet", **SLOW_LOCAL)], ids=["FML", "FedKD"]
)
def test_dropout_of_a_small_shared_model_acts_at_clients_of_other_models(method) -> None:
    sent = []
    for p in (0.0, 0.5):
        models = {"deep": lambda: Net(9, 7), "wet": lambda p=p: WithDropout(p)}
        federation = Federation.from_arrays(
            make_arrays(), models, classes=CLASSES, architecture=["deep"] * len(SIZES)
        )
        server = run_rounds(method, federation, rounds=1).state.server
        sent.append(getattr(server, "mentee", server)["head.weight"])
    assert not torch.equal(*sent)
