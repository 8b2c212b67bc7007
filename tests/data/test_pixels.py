"""Images stored as bytes: every bit comes back, and runs are equal to those on float32."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Federation, simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, DataError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data import federation as federation_module
from fedlowrank.data import pixels
from fedlowrank.data.augment import Augment
from fedlowrank.data.dataset import Dataset, Examples, normalize
from fedlowrank.data.pixels import Pixels, pack_images
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.outcome.export import write as export
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.setup import preparation
from fedlowrank.training.local_data import LocalData
from tests.data.made_datasets import federation


def same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors are the same, -0.0 told from 0.0 and NaN equal to itself."""
    forms = [(t.shape, t.dtype, t.numpy().tobytes()) for t in (one, other)]
    return forms[0] == forms[1]


def raw(*shape: int, seed: int = 0) -> Tensor:
    """Bytes over 255, as all sources of images make them."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, shape).astype(np.float32) / np.float32(255))


# Bytes and their table


@pytest.mark.parametrize("shape", [(300, 3, 6, 5), (300, 1, 8, 8), (400, 7)], ids=str)
@pytest.mark.parametrize("how", ["none", "scale", "standard"])
def test_images_come_out_bit_for_bit(shape: tuple[int, ...], how: Any) -> None:
    y = torch.arange(shape[0]) % 2
    train, test = Examples(raw(*shape), y), Examples(raw(50, *shape[1:], seed=1), y[:50])
    data = normalize(Dataset("d", train, test, ("a", "b")), how)
    given: Any = [data.train.inputs, data.test.inputs, data.train.inputs[:0]]  # type: ignore[union-attr]
    made = pack_images(given)
    index = torch.from_numpy(np.random.default_rng(2).integers(0, 50, 33))
    for p, x in zip(made, given, strict=True):
        assert p.codes.dtype == torch.uint8
        assert (p.shape, p.ndim, len(p), p.dtype) == (x.shape, x.ndim, len(x), x.dtype)
        assert same_bits(p.images(), x)
        assert same_bits(p[7:19], x[7:19])
    for p, x in zip(made[:2], given[:2], strict=True):
        assert same_bits(p.index_select(0, index), x.index_select(0, index))
        assert p.index_select(0, index).is_contiguous()
    assert len({id(p.table) for p in made}) == 1


@pytest.mark.full
def test_a_table_has_a_row_for_each_channel_only_where_one_does_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # values turn up in later chunks, too
    monkeypatch.setattr(pixels, "_CHUNK_VALUES", 64)
    for x, rows in (
        (raw(40, 3, 4, 4), 1),
        (raw(400, 3, 4, 4) * torch.tensor([1.0, 1.1, 1.2])[:, None, None], 3),
    ):
        (packed,) = pack_images([x])
        assert packed.table.shape == (rows, 256)
        assert same_bits(packed.images(), x)


def test_odd_numbers_and_memory_in_another_order_are_kept() -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1.0, 3.0])
    nan = torch.tensor([-1, 0x7FC00001, 0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    x = raw(20, 3, 6, 6)
    for view in (
        odd[torch.randint(8, (60, 2, 3, 3), generator=torch.Generator().manual_seed(0))],
        nan.repeat(6, 2),
        x.contiguous(memory_format=torch.channels_last),
        x[::2],
        x.transpose(2, 3),
        x[:1].expand(5, -1, -1, -1),
    ):
        assert same_bits(pack_images([view])[0].images(), view)


def test_what_takes_more_values_than_a_byte_is_refused_by_its_channel() -> None:
    levels = torch.arange(256).float()
    exact = torch.stack([levels, levels + 1000], 1)
    assert same_bits(pack_images([exact])[0].images(), exact)
    more = torch.cat([exact, torch.tensor([[5.0, 0.5]])])
    with pytest.raises(DataError, match=r"at most 256 values; channel 1 \(counted from 0\) has more"):
        pack_images([exact, more])
    with pytest.raises(DataError, match="has more"):
        pack_images([torch.randn(200, 3, 4, 4)])


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(DataError, match="no images"):
        pack_images([torch.zeros(0, 3, 2, 2)])
    with pytest.raises(DataError, match=r"the same channels, not float32 \[1, 2, 2\], float32 \[3, 2, 2\]"):
        pack_images([torch.zeros(4, 3, 2, 2), torch.zeros(4, 1, 2, 2)])
    for wrong in (torch.zeros(4), torch.zeros(4, 2, dtype=torch.float64)):
        with pytest.raises(DataError, match="stored as bytes must"):
            pack_images([wrong])


# Federations


def parts(of: Federation) -> list[Examples]:
    return [e for c in of.clients for e in (c.train, c.val, c.test)]


@pytest.mark.few(1)
@pytest.mark.parametrize("flat", [False, True])
def test_a_packed_federation_holds_the_same_in_a_quarter_of_the_memory(flat: bool) -> None:
    on = federation(flat=flat)
    packed = on.pack_images()
    assert (on.is_packed, packed.is_packed, packed.pack_images() is packed) == (False, True, True)
    for bytes_, floats in zip(parts(packed), parts(on), strict=True):
        assert isinstance(bytes_.x, Pixels)
        assert bytes_.x.codes.nbytes * 4 == floats.x.nbytes  # type: ignore[union-attr]
        assert same_bits(bytes_.inputs, floats.x)
        assert same_bits(bytes_.take(torch.tensor([2, 0])).x, floats.take(torch.tensor([2, 0])).x)
        assert bytes_.y is floats.y
    assert packed.fingerprint() == on.fingerprint()
    assert packed.describe() == on.describe()
    back = packed.unpack_images()
    assert not back.is_packed
    assert back.fingerprint() == on.fingerprint()
    assert on.unpack_images() is on


def test_the_digest_of_the_examples_is_that_of_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation_module, "_HASH_ROWS", 4)
    on = federation()
    expected = []
    for client in on.clients:
        state = hashlib.blake2b(digest_size=16)
        for e in (client.train, client.val, client.test):
            for t in (e.inputs, e.y):
                assert isinstance(t, Tensor)
                state.update(f"({t.dtype}, {tuple(t.shape)})".encode() + t.numpy().tobytes())
        expected.append(state.hexdigest())
    assert on.fingerprint() == on.pack_images().fingerprint() == expected


def test_what_clients_share_is_packed_and_moved_once() -> None:
    on = federation()
    test = on.clients[0].test
    shifted = Examples(test.x, (test.y + 1) % 3)
    clients = [dataclasses.replace(c, test=t) for c, t in zip(on.clients, (test, test, shifted), strict=True)]
    shared = dataclasses.replace(on, clients=clients)
    packed = shared.pack_images()
    moved = packed.to("meta")
    for made in (packed, moved):
        first, second, third = (c.test for c in made.clients)
        assert first is second
        assert isinstance(first.x, Pixels)
        assert isinstance(third.x, Pixels)
        assert first.x.codes is third.x.codes
        assert len({id(e.x.table) for e in parts(made)}) == 1  # type: ignore[union-attr]
    assert {e.x.device.type for e in parts(moved)} == {"meta"}  # type: ignore[union-attr]
    floats = shared.to("meta")
    assert floats.clients[0].test is floats.clients[1].test
    assert floats.clients[0].test.x is floats.clients[2].test.x


def test_texts_stay_as_they_are() -> None:
    on = Federation.from_arrays([({"input": torch.ones(9, 6)}, torch.arange(9) % 2)], nn.Linear(6, 2))
    with pytest.raises(DataError, match="only images can be stored as bytes; these are named inputs"):
        on.pack_images()


def test_the_run_decides_by_device_and_setting_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    images, said = federation(), list[str]()
    monkeypatch.setattr(preparation, "tell", said.append)
    table = Federation.from_arrays([(torch.randn(400, 5), torch.arange(400) % 3)], lambda: MLP(5, (4,), 3))

    def is_packed(on: Federation, how: str, device: str) -> bool:
        settings: Any = SimpleNamespace(pixels=how, device=device, statistics="local")
        made = preparation.move_to_device(on, settings)
        assert all(e.y.device.type == device for e in parts(made))
        return made.is_packed

    expected = {"auto": [False, True], "float32": [False, False], "bytes": [True, True]}
    for how, packed in expected.items():
        assert [is_packed(images, how, device) for device in ("cpu", "meta")] == packed
    assert not is_packed(images.pack_images(), "float32", "cpu")
    assert not is_packed(table, "auto", "meta")
    assert said == []
    assert not is_packed(table, "bytes", "cpu")
    (message,) = said
    assert message.startswith("run.pixels = 'bytes', but the inputs stay float32: inputs can be stored as")


# Runs


def ends(result: Any) -> Any:
    """All that a run leaves behind but its times."""
    records = [{**dataclasses.asdict(r), "seconds": {}, "cpu_seconds": {}} for r in result.rounds]
    run = result.run
    personal = [run.personal_params(i) for i in run.federation.infos]
    return records, tree.encode(
        [run.state.server, {str(i): s for i, s in run.state.clients.items()}, personal]
    )


AUGMENTS = {"plain": Augment(), "augmented": Augment(flip=True, crop=1, fill=-0.3)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine", "kind"),
    [
        ("fedavg", "sequential", "flat"),
        ("floral", "sequential", "plain"),
        ("fedproto", "sequential", "augmented"),
        ("per_fedavg", "sequential", "augmented"),
        ("pfedlora", "sequential", "augmented"),
        ("fedavg", "vectorized", "augmented"),
        ("fedrep", "vectorized", "flat"),
        ("floral", "vectorized", "plain"),
        ("fedrep", "processes", "augmented"),
    ],
)
def test_runs_on_bytes_and_on_float32_are_equal(name: str, engine: str, kind: str) -> None:
    on = federation(flat=True) if kind == "flat" else federation(augment=AUGMENTS[kind], rank=[2, 2, 2])
    optimizer = AdamW(lr=0.01) if name == "fedrep" else SGD(lr=0.05)
    method = METHODS[name](batch_size=8, optimizer=optimizer)
    floats, bytes_ = (simulate(method, on, rounds=2, engine=engine, pixels=p) for p in ("float32", "bytes"))
    assert (floats.run.federation.is_packed, bytes_.run.federation.is_packed) == (False, True)
    assert ends(floats) == ends(bytes_)
    if engine == "sequential":
        # the comparison can fail
        other = simulate(method, dataclasses.replace(on, seed=1), rounds=2, seed=1)
        assert ends(other)[1] != ends(floats)[1]


def test_clients_with_tables_of_their_own_are_trained_at_once() -> None:
    on = federation(flat=True, sizes=(16, 16))
    alone = [dataclasses.replace(on, clients=[c, c]).pack_images().clients[0] for c in on.clients]
    apart = dataclasses.replace(on, clients=alone)
    assert len({id(c.train.x.table) for c in apart.clients}) == 2  # type: ignore[union-attr]
    method = METHODS["fedavg"](batch_size=8)
    actual = [simulate(method, each, rounds=2, engine="vectorized") for each in (on, apart)]
    assert ends(actual[0]) == ends(actual[1])


def test_batches_are_the_same_in_memory_too() -> None:
    def local(on: Federation) -> LocalData:
        return ENGINES["sequential"]().trainer(METHODS["fedavg"](batch_size=8), on, 0, on.infos[0]).data

    on = federation(augment=AUGMENTS["augmented"])
    floats, bytes_ = local(on), local(on.pack_images())
    pairs = [*zip(floats.batches("local"), bytes_.batches("local"), strict=True)]
    pairs += [*zip(floats.chunks(), bytes_.chunks(), strict=True)]
    assert len(pairs) == 4
    for a, b in pairs:
        assert same_bits(a.x, b.x)
        assert a.x.stride() == b.x.stride()
        assert torch.equal(a.y, b.y)


@pytest.mark.full
def test_a_run_goes_on_with_bytes_and_ends_the_same(tmp_path: Path) -> None:
    def run(folder: str, first: int = 23, **options: Any) -> Any:
        on, where = federation(sizes=(first, 9, 31)), tmp_path / folder
        return simulate("ditto", on, folder=where, rounds=3, checkpoint_every=1, **options)

    def stop(record: Any) -> None:
        if record.round == 2:
            raise InterruptedError

    whole = run("whole", pixels="float32")
    with pytest.raises(InterruptedError):
        run("broken", pixels="float32", on_round=stop)
    with pytest.raises(CheckpointError, match="data: the examples of client 0 are others"):
        run("broken", first=22, pixels="bytes", resume=True)
    actual = run("broken", pixels="bytes", resume=True)
    assert actual.run.federation.is_packed
    assert ends(actual)[1] == ends(whole)[1]
    kept = [(tmp_path / f / "representations.safetensors").read_bytes() for f in ("whole", "broken")]
    assert kept[0] == kept[1]


@pytest.mark.full
def test_a_deployed_model_is_compared_on_images(tmp_path: Path) -> None:
    gains = []
    for how in ("float32", "bytes"):
        method, settings = METHODS["fedslr"](batch_size=8), RunSettings(rounds=1, pixels=how)
        run = Run(method, federation(), settings, ENGINES["sequential"]())
        run.step()
        gains.append(export(run, 0, None, "small", tmp_path / how, repeats=1))
    assert len({(g.agreement, g.difference, g.file, g.size) for g in gains}) == 1
    assert gains[0].agreement == 1
