"""The table and the map of clients show the counts of each class."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.data.describe import count_classes, draw_class_counts, format_class_counts


def client(train, val=(), test=(), notes=()) -> ClientData:
    def part(y):
        return Examples(torch.zeros(len(y), 1), torch.tensor(list(y), dtype=torch.int64))

    return ClientData(part(train), part(val), part(test), notes)


CLIENTS = [client([0, 0, 1], [1], [0, 1], ("client 0: look here",)), client([3] * 12)]


def test_counts():
    assert count_classes(CLIENTS, 5).tolist() == [[2, 1, 0, 0, 0], [0, 0, 0, 12, 0]]


def test_table_with_a_column_for_each_class():
    lines = format_class_counts(CLIENTS, ["a", "b", "c", "longer", "e"]).split("\n")
    assert [line.split() for line in lines[:3]] == [
        ["client", "train", "val", "test", "a", "b", "c", "longer", "e"],
        ["0", "3", "1", "2", "2", "1", ".", ".", "."],
        ["1", "12", "0", "0", ".", ".", ".", "12", "."],
    ]
    assert set(lines[3]) == {"-"}
    assert lines[4].split() == ["all", "15", "1", "2", "2", "1", "0", "12", "0"]
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[5:] == ["* classes that no client trains on: c, e", "* client 0: look here"]


def test_table_of_many_classes_shows_the_largest():
    names = [f"class_{c}" for c in range(100)]
    clients = [client([7] * 5 + [99] * 9 + [50, 51, 52, 53, 54, 55]), client(range(100))]
    text = format_class_counts(clients, names, width=80, top=3)
    lines = text.split("\n")
    assert lines[0].split() == ["client", "train", "val", "test", "classes", "largest"]
    assert lines[1].endswith("8  class_99 9, class_7 5, class_50 1")
    assert lines[2].split()[4] == "100"
    assert max(map(len, lines)) <= 80
    only = format_class_counts(clients[:1], names, width=80)
    assert max(map(len, only.split("\n"))) <= 80
    assert "class_98" in only
    assert "class_99," not in only.split("no client trains on")[1]


def test_bubbles_have_areas_in_proportion():
    figure = draw_class_counts(np.array([[1, 0], [4, 2]]), ["a", "b"])
    assert plt.get_fignums() == []
    (bubbles,) = figure.axes[0].collections
    at = {
        tuple(map(int, xy)): size for xy, size in zip(bubbles.get_offsets(), bubbles.get_sizes(), strict=True)
    }
    assert set(at) == {(0, 0), (1, 0), (1, 1)}
    assert at[1, 0] == pytest.approx(4 * at[0, 0])
    assert at[1, 1] == pytest.approx(2 * at[0, 0])


def test_the_map_shows_clients_by_class(tmp_path):
    counts = np.zeros((60, 3), dtype=np.int64)
    counts[5, 2] = 9
    figure = draw_class_counts(counts, ["a", "b", "c"])
    figure.savefig(tmp_path / "counts.png", dpi=20)
    (image,) = figure.axes[0].images
    shown = image.get_array()
    assert shown.shape == (3, 60)
    assert shown[2, 5] == 9
    assert shown.mask.sum() == 179
