"""Augmentation of training images: every image is a window of its padded self, equal in all engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

from fedlowrank import Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.contract import Batch, ClientInfo, ClientModel, ClientView, Pass
from fedlowrank.core.errors import CheckpointError, ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.augment import Augment
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import client_key
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.per_fedavg import PerFedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage import checkpoint
from fedlowrank.storage.state import State
from fedlowrank.training.cohorts import cohort_batches
from fedlowrank.training.local_data import LocalData
from tests.data import made_datasets

BOTH = Augment(flip=True, crop=1, fill=-3.0)
KINDS = pytest.mark.parametrize(
    "augment", [BOTH, Augment(crop=1), Augment(flip=True)], ids=["both", "crop", "flip"]
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int) -> Tensor:
    """Pixels that are all different and none 0."""
    return torch.randperm(int(np.prod(shape)), generator=generator()).reshape(shape).float() + 1


def changed(augment: Augment, x: Tensor, seed: int = 0) -> Any:
    return augment.apply(x, generator(seed))


def candidates(image: Tensor, augment: Augment) -> list[Tensor]:
    """All that a draw can make of an image [c, h, w], written out with numpy."""
    p, (h, w), out = augment.crop, image.shape[1:], []
    for pixels in (image.numpy(), image.numpy()[:, :, ::-1])[: 1 + augment.flip]:
        padded = np.pad(pixels, ((0, 0), (p, p), (p, p)), constant_values=augment.fill)
        out += [padded[:, i : i + h, j : j + w] for i in range(2 * p + 1) for j in range(2 * p + 1)]
    return [torch.from_numpy(a.copy()) for a in out]


def which(out: Tensor, x: Tensor, augment: Augment) -> list[int]:
    """For each image, which one of its candidates it is; it must be one, and one only."""
    actual = []
    for made, image in zip(out, x, strict=True):
        hits = [k for k, c in enumerate(candidates(image, augment)) if torch.equal(made, c)]
        assert len(hits) == 1
        actual += hits
    return actual


SHAPES = [(40, 3, 9, 9), (40, 1, 8, 11), (40, 2, 12, 7), (1, 3, 6, 6)]
AUGMENTS = [Augment(True, 4), Augment(True, 2, 0.5), Augment(False, 3), Augment(True)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("shape", "augment"), list(zip(SHAPES, AUGMENTS, strict=True)), ids=str)
def test_every_image_is_one_window_of_its_own_padded_self(shape: tuple[int, ...], augment: Augment) -> None:
    x = images(*shape)
    out = changed(augment, x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    which(out, x, augment)
    assert torch.equal(x, images(*shape))
    assert torch.equal(out, changed(augment, x.contiguous(memory_format=torch.channels_last)))
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.few(1)
@KINDS
def test_all_windows_come_equally_often_and_one_says_nothing_of_the_next(augment: Augment) -> None:
    image = images(1, 2, 3, 4)
    known = {c.numpy().tobytes(): k for k, c in enumerate(candidates(image[0], augment))}
    kinds = (1 + augment.flip) * (2 * augment.crop + 1) ** 2
    assert len(known) == kinds
    out = changed(augment, image.expand(100 * kinds**2, -1, -1, -1), 1)
    actual = [known[made.contiguous().numpy().tobytes()] for made in out]
    pairs = [kinds * a + b for a, b in zip(actual[::2], actual[1::2], strict=True)]
    assert chisquare(np.bincount(actual, minlength=kinds)).pvalue > 1e-5
    assert chisquare(np.bincount(pairs, minlength=kinds**2)).pvalue > 1e-5


def test_the_default_does_nothing_and_draws_nothing() -> None:
    random, state = generator(), generator().get_state()
    for x in (images(4, 1, 5, 5), {"ids": torch.zeros(2, 3)}):
        assert Augment().apply(x, random) is x
    assert torch.equal(random.get_state(), state)
    assert [a.is_active for a in (Augment(), Augment(flip=True), Augment(crop=1))] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("crop", -1, " must be a whole number of at least 0; it is -1"),
        ("crop", 2.5, ": input should be a valid integer, got a number with a fractional part; it is 2.5"),
        ("crop", True, ": input should be a valid integer; it is True"),
        ("flip", 0.5, ": input should be a valid boolean; it is 0.5"),
        ("flip", 1, ": input should be a valid boolean; it is 1"),
        ("fill", np.nan, " must be a finite number; it is nan"),
        ("fill", -np.inf, " must be a finite number; it is -inf"),
        ("fill", "black", ": input should be a valid number; it is 'black'"),
        (
            "fill",
            0.5,
            " = 0.5 does nothing with Augment.crop = 0: set Augment.crop, or leave Augment.fill out",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Augment(**{name: value})
    assert str(error.value) == f"Augment.{name}{says}"


# A federation


def federation(augment: Augment = BOTH, sizes: tuple[int, ...] = (23, 9, 31)) -> Federation:
    return made_datasets.federation(augment, sizes)


def local(on: Federation, method: Any, client: int = 0, round: int = 0) -> LocalData:
    return ENGINES["sequential"]().trainer(method, on, round, on.infos[client]).data


def same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs)


def test_batches_are_the_examples_of_their_order_changed_each_for_itself() -> None:
    data = local(federation(), FedAvg(epochs=2, batch_size=8))
    raw: Any = data.examples.x
    order, epochs = data.order("local"), [{}, {}]
    assert len(order) == 6
    for step, (index, batch) in enumerate(zip(order, data.batches("local"), strict=True)):
        assert torch.equal(batch.y, data.examples.y[index])
        assert batch.x.is_contiguous(memory_format=torch.channels_last)
        epochs[step // 3] |= dict(zip(index.tolist(), which(batch.x, raw[index], BOTH), strict=True))
    assert all(len(set(epoch.values())) > 5 for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.full
def test_the_order_is_drawn_as_ever_and_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    on, method = federation(), PFedLoRA(epochs=2, batch_size=8)
    for place, name in enumerate(("model", "adapter")):
        random = (client_key(on, 1, 4) / "order" / place).generator()
        expected = [i for _ in range(2) for i in torch.randperm(9, generator=random).split(8)]
        for augment in (BOTH, Augment()):
            data = local(dataclasses.replace(on, augment=augment), method, 1, 4)
            assert [i.tolist() for i in data.order(name)] == [i.tolist() for i in expected]
            actual = [batch.y.tolist() for batch in data.batches(name)]
            assert actual == [on.clients[1].train.y[i].tolist() for i in expected]
    calls, draw = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: calls.append(a) or draw(*a, **k))
    run_of(FedAvg(batch_size=8), "sequential", on, 1)
    # one for the participants, one for each of three clients with one epoch
    assert len(calls) == 1 + 3


@pytest.mark.full
def test_rounds_clients_places_and_seeds_see_different_changes() -> None:
    # every example is the same image, so that what differs is the draw
    part: Any = Examples(images(1, 2, 8, 8).expand(24, -1, -1, -1), torch.zeros(24, dtype=torch.int64))
    seen = set()
    for seed, client, round_ in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        on = dataclasses.replace(federation(), clients=[ClientData(part, part, part)] * 3, seed=seed)
        for place, name in enumerate(("model", "adapter")):
            (batch,) = local(on, PFedLoRA(epochs=1, batch_size=24), client, round_).batches(name)
            random = (client_key(on, client, round_) / "augment" / place).generator()
            assert torch.equal(batch.x, BOTH.apply(part.x, random))
            seen.add(tuple(which(batch.x, part.x, BOTH)))
    assert len(seen) == 4 * 2


@dataclasses.dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg that keeps all it is shown, and asks for a sum over its data."""

    seen: dict[str, list[Tensor]] = dataclasses.field(
        default_factory=lambda: {"train": [], "total": [], "infer": []}
    )

    def local_update(self, state: None, down: Any, view: ClientView) -> tuple[None, Any]:
        def statistic(params: Any, batch: Batch) -> Tensor:
            self.seen["total"].append(batch.x.clone())
            return batch.x.sum()

        def loss(theta: Any, batch: Batch) -> Tensor:
            self.seen["train"].append(batch.x.clone())
            return nn.functional.cross_entropy(view.model.apply(theta, batch.x), batch.y)

        view.sum_over_data(statistic, down)
        return None, view.train(loss, down, "local", self.optimizer)

    def client_model(self, state: None, down: Any, view: ClientView) -> ClientModel:
        def infer(x: Tensor) -> Tensor:
            self.seen["infer"].append(x.clone())
            return view.model.apply(down, x)

        return ClientModel(down, {"personal": infer})


@pytest.mark.full
def test_statistics_inference_and_the_count_of_operations_see_the_images_as_they_are() -> None:
    watched, records = [Watched(batch_size=8), Watched(batch_size=8)], []
    for method, augment in zip(watched, (BOTH, Augment()), strict=True):
        on = federation(augment, (20,))
        records.append(Run(method, on, RunSettings(rounds=1), ENGINES["sequential"]()).step())
    data, order = on.clients[0], local(on, watched[0]).order("local")
    raw, actual = data.train.x, watched[0].seen
    # what is counted is a step itself
    assert [len(x) for x in actual["train"]] == [8, 8, 4]
    assert all(len(set(which(x, raw[i], BOTH))) > 1 for i, x in zip(order, actual["train"], strict=True))
    assert all(torch.equal(x, raw[i]) for i, x in zip(order, watched[1].seen["train"], strict=True))
    assert {torch.equal(x, raw) for x in actual["total"]} == {True}
    assert all(torch.equal(x, part.x) for x, part in zip(actual["infer"], (data.val, data.test), strict=True))
    assert records[0].flops == records[1].flops > 0
    assert records[0].training_losses != records[1].training_losses


def test_adaptation_before_inference_is_a_pass_of_training() -> None:
    runs = [run_of(PerFedAvg(batch_size=8), "sequential", federation(a), 0) for a in (BOTH, Augment())]
    assert not tree.equal(*(run.personal_params(run.federation.infos[0]) for run in runs))


def test_inputs_that_are_no_images_or_too_small_are_refused_with_the_client() -> None:
    augment = BOTH
    start = r"client 0: augment\.flip and augment\.crop need images \[n, C, height, width\], not "
    y = torch.zeros(12, dtype=torch.int64)
    for x, shape in ((torch.randn(12, 5), r"\[10, 5\]"), (torch.randn(12, 8, 8), r"\[10, 8, 8\]")):
        with pytest.raises(DataError, match=start + shape):
            Federation.from_arrays([(x, y)], nn.Flatten(), augment=augment)
        # examples that reach a trainer past a federation do not train unchanged either
        past = LocalData(ClientInfo(0, 12, "m"), Examples(x, y), {"a": Pass(1, 4)}, Key((0,)), augment)
        with pytest.raises(DataError, match="need images"):
            next(past.batches("a"))
    part = Examples({"left": torch.randn(12, 5), "right": torch.randn(12, 5)}, y)
    with pytest.raises(DataError, match=start + r"named ones \(left, right\)"):
        dataclasses.replace(federation(augment, (9,)), clients=[ClientData(part, part, part)])
    with pytest.raises(DataError, match=r"client 0: augment\.crop must be smaller .* it is 8, they are 8×8"):
        federation(Augment(crop=8))
    federation(Augment(crop=7))


# Engines


def states(run: Run) -> Any:
    return run.state.server, {str(i): c for i, c in sorted(run.state.clients.items())}


def run_of(method: Any, engine: str, on: Federation, rounds: int = 3, state: State | None = None) -> Run:
    run = Run(method, on, RunSettings(rounds=4), ENGINES[engine]())
    if state is not None:
        run.restore(state)
    for _ in range(rounds):
        run.step()
    return run


def gap(one: Run, other: Run) -> float:
    a, b = dict(tree.leaves(states(one))), dict(tree.leaves(states(other)))
    assert a.keys() == b.keys()
    return max(float((a[p].double() - b[p].double()).abs().max()) for p in a)


@pytest.mark.full
def test_all_engines_and_a_resumed_run_agree(tmp_path: Path) -> None:
    on, method = federation(), PFedLoRA(batch_size=8, epochs=2, optimizer=SGD(lr=0.05, momentum=0.5))
    whole = run_of(method, "sequential", on)
    assert tree.equal(states(whole), states(run_of(method, "wire", on)))
    half = run_of(method, "sequential", on, 1)
    checkpoint.save(tmp_path, half.round, half.state.server, half.state.clients)
    again = run_of(method, "sequential", on, 2, checkpoint.load(tmp_path))
    assert tree.equal(states(whole), states(again))
    assert gap(whole, run_of(method, "vectorized", on)) < 1e-4
    assert gap(whole, run_of(method, "sequential", federation(Augment()))) > 1e-3


@pytest.mark.full
def test_clients_at_once_see_the_very_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    on, method, seen, pad = federation(), FedAvg(epochs=2, batch_size=8), [], cohort_batches.join_batches
    monkeypatch.setattr(
        cohort_batches, "join_batches", lambda batches: seen.append(list(batches)) or pad(batches)
    )
    run_of(method, "vectorized", on, 1)
    # those with the most steps first
    for place, client in enumerate((2, 0, 1)):
        actual = [step[place] for step in seen if len(step) > place]
        assert same(actual, list(local(on, method, client).batches("local")))


# Experiment files and run folders

TABLES: dict[str, Any] = {
    "method": "fedavg",
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 30},
    "model": {"names": ["mlp"], "hidden": [6]},
    "run": {"rounds": 3, "representations": 0, "participation": 0.1},
}


@pytest.mark.full
def test_an_experiment_file_augments() -> None:
    made = ExperimentConfig.parse({**TABLES, "augment": {"flip": True, "crop": 2, "fill": 1}})
    on = made.federation()
    assert on.augment == made.augment == Augment(True, 2, 1.0)
    # black is 0 unless the file says otherwise, and so is the padding
    assert min(float(torch.as_tensor(c.train.x).min()) for c in on.clients) == Augment().fill == 0.0
    assert ExperimentConfig.parse(TABLES).federation().augment == Augment()
    with pytest.raises(DataError, match=r"client 0: augment\.flip and augment\.crop need images"):
        ExperimentConfig.parse({**TABLES, "data": {"source": "iris"}, "augment": {"crop": 1}}).federation()


def go(folder: Path, on: Federation, resume: bool = False, until: int = 3, **given: Any) -> Any:
    """A run in a folder that someone interrupts after a round, or one that goes on."""

    def stop(record: Any) -> None:
        if record.round == until < 3:
            raise InterruptedError

    settings = {"rounds": 3, "representations": 0, **given}
    return simulate("fedavg", on, folder=folder, resume=resume, on_round=stop, **settings)


@pytest.mark.full
def test_a_run_goes_on_with_its_own_augmentation_or_none_and_no_other(tmp_path: Path) -> None:
    on, folder = federation(), tmp_path / "cut"
    whole = go(tmp_path / "whole", on)
    with pytest.raises(InterruptedError):
        go(folder, on, until=1)
    assert json.loads((folder / "run.json").read_text())["augment"] == {"flip": True, "crop": 1, "fill": -3.0}
    for other, says in (
        (Augment(True, 2, -3.0), r"augment\.crop was 1 and is 2"),
        (Augment(False, 1, -3.0), r"augment\.flip was True and is False"),
        (Augment(True, 1), r"augment\.fill was -3.0 and is 0.0"),
        (Augment(), "augment is only in the stored configuration"),
    ):
        with pytest.raises(CheckpointError, match=says):
            go(folder, federation(other), resume=True)
    again = go(folder, on, resume=True)
    assert tree.equal(states(whole.run), states(again.run))
    assert [r.untimed() for r in whole.rounds] == [r.untimed() for r in again.rounds]
    # where nothing is changed, the folder is as it was before there was anything to change
    go(tmp_path / "plain", federation(Augment()))
    assert "augment" not in json.loads((tmp_path / "plain" / "run.json").read_text())
    with pytest.raises(CheckpointError, match="augment is only in the new configuration"):
        go(tmp_path / "plain", on, resume=True)
    assert len(go(tmp_path / "plain", federation(Augment()), resume=True).rounds) == 4


def test_images_whose_pixels_have_labels_are_refused() -> None:
    x = images(6, 1, 8, 8)
    clients = [(x, (x[:, 0] > 0.5).long())] * 2
    with pytest.raises(DataError, match=r"client 0: augment.*labels of their pixels"):
        Federation.from_arrays(clients, torch.nn.Conv2d(1, 2, 1), augment=Augment(flip=True))
    Federation.from_arrays(clients, torch.nn.Conv2d(1, 2, 1))
