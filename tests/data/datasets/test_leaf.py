"""LEAF's files, and TensorFlow Federated's database of Shakespeare's plays."""

import gzip
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlowrank import SGD, Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.arrays import Arrays
from fedlowrank.data.datasets.leaf import Femnist
from fedlowrank.data.datasets.shakespeare import ALPHABET, CLASSES, Shakespeare
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.char_lstm import CharLSTM

LINE = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings"


def write(file, users):
    file.parent.mkdir(parents=True, exist_ok=True)
    samples = [len(data["y"]) for data in users.values()]
    file.write_text(json.dumps({"users": list(users), "num_samples": samples, "user_data": users}))


def images(labels):
    random = np.random.default_rng(len(labels))
    return {"x": random.random((len(labels), 784)).round(3).tolist(), "y": labels}


def test_femnist_by_writer(tmp_path):
    first, second = {"f01": images([3, 10]), "f02": images([61])}, {"f03": images([36, 0, 1])}
    write(tmp_path / "train" / "all_data_0.json", first)
    write(tmp_path / "train" / "all_data_1.json", second)
    write(tmp_path / "test" / "all_data_0.json", {"f03": images([5]), "f01": images([2, 2])})
    data = Femnist(str(tmp_path)).load()
    assert data.train.x.shape == (6, 1, 28, 28)
    assert data.train.x[4, 0, 1, 2] == pytest.approx(second["f03"]["x"][1][30])
    assert data.train.y.tolist() == [3, 10, 61, 36, 0, 1]
    assert [data.classes[y] for y in data.train.y] == ["3", "A", "z", "a", "0", "1"]
    assert data.natural.tolist() == [0, 0, 1, 2, 2, 2]
    assert (data.test.y.tolist(), data.natural_test.tolist()) == ([2, 2, 5], [0, 0, 2])
    few = Femnist(str(tmp_path), writers=2).load()
    assert (few.natural.tolist(), few.natural_test.tolist()) == ([0, 0, 1], [0, 0])
    assert Femnist(str(tmp_path / "train")).load().test is None


def test_files_that_are_not_leafs(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(DataError, match=r"holds no \.json file of LEAF"):
        Femnist(str(tmp_path)).load()
    for content, message in (
        ("{", "as JSON"),
        ("{}", "not of LEAF's form"),
        ('{"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [], "y": []}}}', "num_samples is 2"),
        ('{"users": ["u"], "num_samples": [1], "user_data": {}}', "'u' has no lists"),
        ('{"users": ["u", "v"], "num_samples": [0], "user_data": {"u": {"x": [], "y": []}}}', "as long as"),
        ('{"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [[1]], "y": [0]}}}', "784 numbers"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            Femnist(str(file)).load()
    write(file, {"u": images([1])})
    write(tmp_path / "b.json", {"u": images([1])})
    with pytest.raises(DataError, match="'u' is in another file"):
        Femnist(str(tmp_path)).load()


def decode(data, i):
    text = "".join(ALPHABET[int(c)] if c < 80 else "?" for c in data.train.x[i])
    return text, CLASSES[int(data.train.y[i])]


def test_shakespeare_from_leafs_files(tmp_path):
    pairs = [(LINE[i : i + 80], LINE[i + 80]) for i in range(5)]
    users = {
        "HAMLET": {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]},
        "GHOST": {"x": ["é" * 80], "y": ["é"]},
    }
    write(tmp_path / "a.json", users)
    data = Shakespeare(str(tmp_path)).load()
    assert [decode(data, i) for i in range(5)] == [(x, repr(y)) for x, y in pairs]
    assert decode(data, 5) == ("?" * 80, "other")
    assert data.natural.tolist() == [0] * 5 + [1]
    # the same windows from rows of text
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"play": "H", "speaker": "H", "text": LINE[:85]}))
    assert torch.equal(Shakespeare(str(rows)).load().train.x, data.train.x[:5])
    assert len(Shakespeare(str(rows), step=2).load().train) == 3
    with pytest.raises(DataError, match=r"Lower data\.length"):
        Shakespeare(str(rows), length=85).load()


def test_shakespeare_from_a_json_list_of_speeches(tmp_path):
    speeches = [{"play": "H", "speaker": name, "text": LINE} for name in ("HAMLET", "GHOST", "HAMLET")]
    rows, same = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(speeches, indent=1))
    same.write_text("\n".join(map(json.dumps, speeches)))
    data, expected = (Shakespeare(str(file)).load() for file in (rows, same))
    assert torch.equal(data.train.x, expected.train.x)
    # two speeches, and the line break between them, of HAMLET
    assert data.natural.bincount().tolist() == [2 * len(LINE) + 1 - 80, len(LINE) - 80]
    rows.write_text('{"speeches": []}')
    with pytest.raises(DataError, match=r"not of LEAF's form"):
        Shakespeare(str(rows)).load()


def test_a_speech_without_its_speaker_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for speaker in ({}, {"speaker": None}, {"speaker": ""}):
        speeches = [{"play": "H", "speaker": "HAMLET", "text": LINE}, {"play": "H", "text": LINE} | speaker]
        rows.write_text("\n".join(map(json.dumps, speeches)))
        with pytest.raises(DataError, match=r"line 2 names no speaker in 'play', 'speaker'"):
            Shakespeare(str(rows)).load()


def test_settings_without_effect_on_the_kind_of_file_are_refused(tmp_path):
    folder, database = tmp_path / "leaf", tmp_path / "plays.sqlite"
    write(folder / "a.json", {"HAMLET": {"x": [LINE[:80]], "y": [LINE[80]]}})
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
    changes = {"length": 40, "step": 2, "speaker": ("role",), "text": "speech"}
    ignored = [(folder, name) for name in changes] + [(folder / "a.json", "step"), (database, "speaker")]
    for path, name in ignored:
        with pytest.raises(ConfigError, match=rf"data\.{name} has no effect on"):
            Shakespeare(str(path), **{name: changes[name]}).load()
    assert len(Shakespeare(str(folder), length=80, step=1).load().train) == 1
    # the database is read with these
    with pytest.raises(DataError, match="holds no examples"):
        Shakespeare(str(database), length=40, step=2, roles=1).load()


def serialized(text):
    """A ``tf.train.Example``, written by Google's library from the published definition."""
    pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {
        "BytesList": [("value", 1, 12, 3, "")],
        "Feature": [("bytes_list", 1, 11, 1, ".t.BytesList")],
        "Entry": [("key", 1, 9, 1, ""), ("value", 2, 11, 1, ".t.Feature")],
        "Features": [("feature", 1, 11, 3, ".t.Entry")],
        "Example": [("features", 1, 11, 1, ".t.Features")],
    }
    for name, fields in kinds.items():
        kind = file.message_type.add(name=name)
        for field, number, of, label, type_name in fields:
            kind.field.add(name=field, number=number, type=of, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    example = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    entry = example.features.feature.add(key="snippets")
    entry.value.bytes_list.value.append(text.encode())
    return example.SerializeToString()


def test_shakespeare_from_the_database(tmp_path):
    file = tmp_path / "shakespeare.sqlite"
    with sqlite3.connect(file) as database:
        database.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        rows = [
            ("train", "H", LINE * 2),
            ("train", "H", "Words."),
            ("test", "H", LINE),
            ("train", "A", "No."),
        ]
        rows = [(split, client, serialized(text)) for split, client, text in rows]
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    database.close()
    data = Shakespeare(str(file)).load()
    whole = LINE * 2 + "\nWords."
    assert len(data.train) == len(whole) - 80
    assert decode(data, len(whole) - 81) == (whole[-81:-1], repr("."))
    assert len(data.test) == len(LINE) - 80
    assert set(data.natural.tolist()) == set(data.natural_test.tolist()) == {0}
    file.write_text("no database")
    with pytest.raises(DataError, match="no database"):
        Shakespeare(str(file)).load()
    with pytest.raises(DataError, match="data get shakespeare"):
        Shakespeare(str(tmp_path / "missing.sqlite")).load()


def test_characters_must_stay_numbers():
    tables = {"data": {"source": "shakespeare", "path": "x"}, "model": {"names": ["char_lstm"]}}
    with pytest.raises(ConfigError, match=r"Set data\.normalize to 'none'"):
        ExperimentConfig.parse(tables)


@pytest.mark.full
def test_the_model_is_torchs_and_learns_a_text():
    torch.manual_seed(0)
    model = CharLSTM(5, 3, 16, 1)
    text = torch.tensor([0, 1, 2, 3, 4] * 8)
    x, y = text.unfold(0, 4, 1)[:-1].float(), text[4:]
    # an independent recurrence: PyTorch's cell, step by step
    cell = torch.nn.LSTMCell(3, 16)
    names = {
        "weight_ih": "weight_ih_l0",
        "weight_hh": "weight_hh_l0",
        "bias_ih": "bias_ih_l0",
        "bias_hh": "bias_hh_l0",
    }
    cell.load_state_dict({own: getattr(model.lstm, name) for own, name in names.items()})
    state = None
    for t in range(4):
        state = cell(model.embed(x[:, t].long()), state)
    torch.testing.assert_close(model(x), model.head(state[0]))
    federation = Federation.from_arrays([(x, y), (x, y)], model, val=0, test=0.2)
    method = METHODS["fedavg"](optimizer=SGD(lr=1.0), batch_size=8)
    assert simulate(method, federation, rounds=8).mean_accuracy() > 0.9


@pytest.fixture
def shared():
    folder = os.environ.get("FEDLOWRANK_SHARED_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDLOWRANK_SHARED_DATA names no folder with femnist and shakespeare")
    return Path(folder)


@pytest.mark.data
def test_real_shakespeare(shared):
    file = shared / "shakespeare" / "by_speaker.jsonl.gz"
    data = Shakespeare(str(file), roles=20, step=40).load()
    row = json.loads(gzip.decompress(file.read_bytes()).split(b"\n")[0])
    assert decode(data, 1) == (row["text"][40:120], repr(row["text"][120]))
    assert data.natural.unique().tolist() == list(range(20))
    assert int((data.train.y == 80).sum()) < 0.01 * len(data.train)


@pytest.mark.data
def test_real_femnist(shared):
    data = Arrays(str(shared / "femnist" / "femnist-105writers.npz"), "hw").load()
    assert len(data.natural.unique()) == 105
    assert data.train.x.shape == (14_708, 1, 28, 28)
    assert float(data.train.x.max()) == 1
