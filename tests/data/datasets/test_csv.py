"""CSV and Parquet tables become features, classes and clients; a file that does not fit is refused by name."""

import re
from decimal import Decimal

import numpy as np
import pandas
import pytest
import sklearn.datasets
import sklearn.preprocessing
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import DataError
from fedlowrank.data.dataset import ClientData, normalize, standardize_client
from fedlowrank.data.datasets.csv_table import Csv

TABLE = """hospital,age,smoker,ward,diagnosis
north,40,True,b,well
south,50,False,a,ill
north,,True,b,ill
south,60,False,,well
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "patients.csv").write_text(TABLE)
    return str(tmp_path / "patients.csv")


def test_columns_become_features_classes_and_clients(path):
    data = Csv(path, "diagnosis", "hospital", missing="mean").load()
    assert data.name == "patients"
    # age with the mean of 40, 50, 60; smoker; ward: a, b, missing
    assert data.train.x.tolist() == [[40, 1, 0, 1, 0], [50, 0, 1, 0, 0], [50, 1, 0, 1, 0], [60, 0, 0, 0, 1]]
    assert data.classes == ("ill", "well")
    assert data.train.y.tolist() == [1, 0, 0, 1]
    assert data.natural.tolist() == [0, 1, 0, 1]
    dropped = Csv(path, "diagnosis", "hospital", missing="drop").load()
    assert dropped.train.x.tolist() == [[40, 1, 0, 1], [50, 0, 1, 0]]
    assert dropped.notes == (
        "2 of 4 rows dropped, which have empty cells",
        "numeric columns: age, smoker",
        "one-hot columns, with their numbers of categories: ward (2)",
    )
    fixed = Csv(path, "diagnosis", features=("smoker",), classes=("well", "dead", "ill")).load()
    assert fixed.train.y.tolist() == [0, 2, 2, 0]
    assert fixed.classes == ("well", "dead", "ill")


def test_dropping_every_row_is_refused(tmp_path):
    full, empty = tmp_path / "full.csv", tmp_path / "empty.csv"
    full.write_text("a,b,y\n1,2,0\n3,4,1\n5,,0\n")
    empty.write_text("a,b,y\n1,,0\n,2,1\n")
    message = r"empty\.csv': every row has an empty cell in 'a', 'b', so .* 'mean', or leave columns out"
    for csv in (Csv(str(empty), "y", missing="drop"), Csv(str(full), "y", missing="drop", test=str(empty))):
        with pytest.raises(DataError, match=message):
            csv.load()
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=message):
        Csv(str(empty), "y", missing="drop").load_with_rows(str(tmp_path / "rows.csv"))
    kept = Csv(str(empty), "y", features=("a",), missing="drop").load()
    assert kept.train.x.tolist() == [[1.0]]


def test_decimal_commas_are_numbers_or_an_error(tmp_path):
    file = tmp_path / "t.csv"
    rows = [f'"{n // 10},{n % 10}",a,{n % 2}' for n in range(40)]
    file.write_text("\n".join(["dose,ward,y", *rows]))
    with pytest.raises(
        DataError, match=r"'dose' holds numbers with a decimal comma, such as '0,0'.*data\.decimal"
    ):
        Csv(str(file), "y").load()
    with pytest.raises(DataError, match=r"'dose' holds numbers with a decimal comma"):
        Csv(str(file), "dose").load()
    data = Csv(str(file), "y", decimal=",").load()
    np.testing.assert_allclose(data.train.x[:, 0].numpy(), np.arange(40) / 10, rtol=1e-6)
    file.write_text("\n".join(["dose,ward,y", *rows, "high,a,1"]))
    with pytest.raises(DataError, match=r"'high' in row 41 of the data is no number"):
        Csv(str(file), "y", decimal=",").load()


def test_one_cell_of_text_does_not_make_categories_of_numbers(tmp_path):
    file, rows = tmp_path / "t.csv", [f"{age},{age % 2 + 0.5},{'ab'[age % 2]}" for age in range(40)]

    def write(row: str, path=file):
        path.write_text("\n".join(["age,dose,y", *rows[:3], row, *rows[3:]]))

    for text in ("?", "unknown"):
        write(f"{text},0.5,a")
        with pytest.raises(
            DataError,
            match=rf"t\.csv': the column 'age' holds numbers, but the value '{re.escape(text)}' in row 4 ",
        ):
            Csv(str(file), "y").load()
        write(f"30,{text},a")
        with pytest.raises(DataError, match=rf"'dose' .* '{re.escape(text)}' in row 4 .*'classification'"):
            Csv(str(file), "dose").load()
        assert text in Csv(str(file), "dose", features=("age",), task="classification").load().classes
    # a placeholder does not count, however often; rows are numbered as in the file
    file.write_text("age,dose,y\n1,,a\n2,1,a\n?,2,b\n?,3,b\n")
    with pytest.raises(DataError, match=r"'age' .* '\?' in row 3 .*first of 2 such values"):
        Csv(str(file), "y", missing="drop").load()
    # as the message says: an empty cell, or categories with a letter
    write(",0.5,a")
    data = Csv(str(file), "y", missing="mean").load()
    assert data.train.x[3].tolist() == pytest.approx([np.arange(40).mean(), 0.5])
    file.write_text("\n".join(["code,y", *[f"c{n % 5},{'ab'[n % 2]}" for n in range(20)]]))
    assert Csv(str(file), "y").load().train.x.shape == (20, 5)
    (tmp_path / "c.csv").write_text("\n".join(["code,y", *["1,0", "01,1"] * 10, "10+,0", "2,unknown"]))
    with pytest.raises(DataError, match=r"data\.categories = \['code'\]"):
        Csv(str(tmp_path / "c.csv"), "y", classes=("0", "1", "unknown")).load()
    given = {"classes": ("0", "unknown", "1"), "categories": ("code",)}
    data = Csv(str(tmp_path / "c.csv"), "y", **given).load()
    assert data.columns == ("code=01", "code=1", "code=10+", "code=2")
    assert data.train.x[:2].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert data.train.y.tolist() == [0, 2] * 10 + [0, 1]
    with pytest.raises(DataError, match=r"data\.categories names 'cod', .*Did you mean 'code'"):
        Csv(str(tmp_path / "c.csv"), "y", classes=given["classes"], categories=("cod",)).load()
    # the training part decides for the test part
    train = tmp_path / "train.csv"
    train.write_text("\n".join(["age,dose,y", *rows]))
    file.write_text("age,dose,y\nold,0.5,a\n")
    with pytest.raises(DataError, match=r"t\.csv': the column 'age' .*'old' in row 1"):
        Csv(str(train), "y", test=str(file)).load()
    train.write_text("age,y\nold,a\n12,b\n")
    file.write_text("age,y\n" + "12,a\n" * 20 + "old,b\n")
    assert Csv(str(train), "y", test=str(file)).load().columns == ("age=12", "age=old")
    # points beside a decimal comma
    file.write_text("dose;y\n1.5;a\n2.5;b\n")
    with pytest.raises(DataError, match=r"decimal point, such as '1\.5'.*data\.decimal = \"\.\""):
        Csv(str(file), "y", decimal=",", separator=";").load()


def test_a_column_without_a_name_is_no_feature(tmp_path):
    frame = pandas.DataFrame({"age": [1, 2, 3], "y": ["a", "b", "a"]})
    frame.to_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"the column 1 has no name\. .*index=False.*data\.features"):
        Csv(str(tmp_path / "t.csv"), "y").load()
    assert Csv(str(tmp_path / "t.csv"), "y", features=("age",)).load().columns == ("age",)
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert Csv(str(tmp_path / "t.csv"), "y").load().columns == ("age",)
    (tmp_path / "t.csv").write_text("age,y,\n1,a,\n2,b,\n")
    with pytest.raises(
        DataError, match=r"the column 3 has no name and only empty cells.*separator at the end"
    ):
        Csv(str(tmp_path / "t.csv"), "y").load()


def test_semicolons_between_cells(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("dose;ward;y\n1,5;a;0\n-2,25;b;1\n")
    data = Csv(str(file), "y", decimal=",", separator=";").load()
    assert data.train.x.tolist() == [[1.5, 1, 0], [-2.25, 0, 1]]
    assert data.train.y.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"single column, 'dose;ward;y'. Set data.separator to ';'"):
        Csv(str(file), "y").load()


def test_a_test_file_is_encoded_as_the_training_file(path, tmp_path):
    test = tmp_path / "test.csv"
    test.write_text("hospital,age,smoker,ward,diagnosis\nsouth,,False,a,ill\n")
    data = Csv(path, "diagnosis", "hospital", test=str(test), missing="mean").load()
    assert data.test.x.tolist() == [[50, 0, 1, 0, 0]]
    assert (data.test.y.tolist(), data.natural_test.tolist()) == ([0], [1])
    test.write_text("hospital,age,smoker,ward,diagnosis\nsouth,3,False,c,ill\n")
    with pytest.raises(DataError, match="the value 'c', which the training part lacks"):
        Csv(path, "diagnosis", "hospital", test=str(test), missing="mean").load()


@pytest.mark.full
def test_real_labels_are_a_regression_and_parquet_is_the_same(tmp_path):
    frame = sklearn.datasets.load_diabetes(as_frame=True).frame
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    raw = sklearn.datasets.load_diabetes()
    for end in ("csv", "parquet"):
        data = Csv(str(tmp_path / f"d.{end}"), "target").load()
        assert data.classes == ()
        np.testing.assert_array_equal(data.train.x.numpy(), raw.data.astype(np.float32))
        np.testing.assert_array_equal(data.train.y.numpy(), raw.target.astype(np.float32)[:, None])
    whole = Csv(str(tmp_path / "d.csv"), "target", task="classification").load()
    assert len(whole.classes) == len(set(raw.target))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": "diagnosis"}, r"'age' has 1 empty cell, in row 3 .* 'drop' or 'mean'"),
        (
            {"label": "ward", "missing": "mean"},
            r"'ward' has 1 empty cell, in row 4 .*Fill it in\.$",
        ),
        ({"label": "diagnose"}, "Did you mean 'diagnosis'"),
        ({"label": "diagnosis", "client": "clinic"}, "no column 'clinic'"),
        ({"label": "diagnosis", "features": ("diagnosis",)}, "besides label and client"),
        ({"label": "diagnosis", "features": ("smoker",), "task": "regression"}, "needs numbers"),
        ({"label": "diagnosis", "features": ("smoker",), "classes": ("well",)}, "the value 'ill'"),
    ],
)
def test_it_names_what_is_wrong(path, settings, message):
    with pytest.raises(DataError, match=message):
        Csv(path, **settings).load()


def test_files_that_are_no_tables(tmp_path):
    frame = pandas.DataFrame({"name": [f"p{i}" for i in range(101)], "y": [0, 1] * 50 + [0]})
    frame.to_csv(tmp_path / "names.csv", index=False)
    with pytest.raises(DataError, match="'name' is text with 101 different values"):
        Csv(str(tmp_path / "names.csv"), "y").load()
    (tmp_path / "a.xls").write_text("x")
    (tmp_path / "empty.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_text("x")
    for name, message in (
        ("a.xls", "ends in none"),
        ("empty.csv", "no rows"),
        ("broken.parquet", "cannot read"),
        ("missing.csv", f"^there is no file '{tmp_path}/missing.csv'"),
    ):
        with pytest.raises(DataError, match=message):
            Csv(str(tmp_path / name), "y").load()


def test_clients_standardize_by_their_own_training_examples(tmp_path):
    random = np.random.default_rng(0)
    hospital = np.repeat(["east", "west"], 50)
    x = random.normal(np.where(hospital == "west", 100, 0)[:, None], 3, (100, 2))
    frame = pandas.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "y": random.integers(0, 2, 100), "hospital": hospital}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    tables = {
        "data": {"source": "csv", "path": str(tmp_path / "t.csv"), "label": "y", "client": "hospital"},
        "model": {"names": ["mlp"]},
        "partition": {"kind": "natural"},
    }
    made = {}
    for how in ("none", "standard_per_client", "standard"):
        tables["data"]["normalize"] = how
        made[how] = ExperimentConfig.parse(tables).federation()
    for raw, own in zip(made["none"].clients, made["standard_per_client"].clients, strict=True):
        mean, deviation = raw.train.x.double().mean(0), raw.train.x.double().std(0, correction=0)
        for part in ("train", "val", "test"):
            expected = (getattr(raw, part).x.double() - mean) / deviation
            torch.testing.assert_close(getattr(own, part).x.double(), expected, rtol=1e-4, atol=1e-4)
    # by the statistics of all, the clients still differ
    assert abs(made["standard"].clients[0].train.x.mean()) > 0.9


def test_inputs_are_named_by_their_columns_and_values(path):
    data = Csv(path, "diagnosis", "hospital", missing="mean").load()
    assert data.columns == ("age", "smoker", "ward=a", "ward=b", "ward=missing")
    assert Csv(path, "diagnosis", features=("ward", "smoker"), missing="drop").load().columns[-1] == "smoker"
    tables = {"data": {"source": "csv", "path": path, "label": "diagnosis", "features": ["smoker"]}}
    made = ExperimentConfig.parse({**tables, "method": "fedavg", "partition": {"kind": "iid", "clients": 1}})
    # the names stay through normalization and partition
    assert made.shares().columns == ("smoker",)


def test_rows_with_more_cells_than_names_are_refused_and_separators_at_their_end_are_not(tmp_path):
    file = tmp_path / "t.csv"
    for rows in ("40,1,0,7\n50,2,1,8\n", "0,1,0,7\n1,2,1,8\n"):
        file.write_text(f"age,dose,y\n{rows}")
        with pytest.raises(DataError, match="have more cells than its first line has names"):
            Csv(str(file), "y").load()
    file.write_text("age,dose,y\n40,1,0,\n50,2,1,\n")
    data = Csv(str(file), "y").load()
    assert data.train.x.tolist() == [[40, 1], [50, 2]]
    assert data.train.y.tolist() == [0, 1]


def test_times_are_normalized_in_float64(tmp_path):
    start = 1_700_000_000
    seconds = start + np.array([0, 30, 60, 63, 7, 21])
    frame = pandas.DataFrame({"age": [40, 50, 60, 70, 45, 55], "t": seconds, "y": [0, 1, 0, 1, 0, 1]})
    frame.iloc[:4].to_csv(tmp_path / "a.csv", index=False)
    frame.iloc[4:].to_csv(tmp_path / "b.csv", index=False)
    data = Csv(str(tmp_path / "a.csv"), "y", test=str(tmp_path / "b.csv")).load()
    for how, scaler in (
        ("scale", sklearn.preprocessing.MinMaxScaler()),
        ("standard", sklearn.preprocessing.StandardScaler()),
    ):
        actual = normalize(data, how)
        truth = scaler.fit_transform(frame[["age", "t"]].iloc[:4].astype("float64"))
        np.testing.assert_allclose(actual.train.x.numpy(), truth, atol=1e-6)
        np.testing.assert_allclose(
            actual.test.x.numpy(), scaler.transform(frame[["age", "t"]].iloc[4:].astype("float64")), atol=1e-6
        )
    own = standardize_client(ClientData(*[normalize(data, "standard_per_client").train] * 3))
    np.testing.assert_allclose(own.train.x.numpy(), truth, atol=1e-6)
    with pytest.warns(UserWarning, match=r"column 't' of 'a'.*between 1700000000 and 1700000063"):
        same = normalize(data, "none")
    assert torch.equal(same.train.x, data.train.x)


def test_parquet_columns_of_large_numbers_with_gaps(tmp_path):
    pytest.importorskip("pyarrow")
    values = pandas.array([123456789, None, 123456793, 123456791], dtype="Int64")
    pandas.DataFrame({"ward": list("abab"), "id": values, "y": [0, 1, 0, 1]}).to_parquet(
        tmp_path / "a.parquet"
    )
    data = normalize(Csv(str(tmp_path / "a.parquet"), "y", missing="mean").load(), "scale")
    assert data.columns == ("ward=a", "ward=b", "id")
    assert data.train.x[:, 2].tolist() == [0, 0.5, 1, 0.5]


@pytest.mark.parametrize(("value", "shown"), [("inf", "inf"), ("-1e40", r"-1e\+40")])
def test_infinities_are_named(tmp_path, value, shown):
    (tmp_path / "a.csv").write_text(f"age,x,y\n1,3,0\n2,{value},1\n3,4,0\n")
    with pytest.raises(DataError, match=rf"'x' holds {shown} in row 2 of the data"):
        Csv(str(tmp_path / "a.csv"), "y").load()
    with pytest.raises(DataError, match=rf"'x' holds {shown} in row 2 of the data"):
        Csv(str(tmp_path / "a.csv"), "x").load()


def test_separators_of_thousands_have_two_readings(tmp_path):
    (tmp_path / "a.csv").write_text('dose,y\n"1,234",a\n"12,345,678",b\n999,b\n')
    with pytest.raises(DataError, match=r"'1,234', which may be 1234 .*thousands or 1\.234 with a decimal"):
        Csv(str(tmp_path / "a.csv"), "y").load()
    (tmp_path / "a.csv").write_text('dose,y\n"1,234",a\n"12,34",b\n')
    with pytest.raises(DataError, match=r"with a decimal comma.*Set data\.decimal"):
        Csv(str(tmp_path / "a.csv"), "y").load()


@pytest.mark.parametrize("text", ["NA", "None"])
def test_texts_that_count_as_empty_are_named(tmp_path, text):
    (tmp_path / "a.csv").write_text(f"x,z,country,y\n1,1,DE,0\n\n2,1,{text},1\n3,1,,1\n")
    with pytest.raises(
        DataError, match=rf"'country' has 2 empty cells, the first in row 2 .*, which reads '{text}'"
    ):
        Csv(str(tmp_path / "a.csv"), "y").load()
    (tmp_path / "a.csv").write_text("x,y\n1,0\n,1\n")
    with pytest.raises(DataError, match=r"1 empty cell, in row 2 of the data\. Fill it in"):
        Csv(str(tmp_path / "a.csv"), "y").load()


def test_clients_are_read_as_text(tmp_path):
    (tmp_path / "a.csv").write_text("site,x,y\n01,1,0\n1,2,1\n001,3,0\n01,4,1\n")
    data = Csv(str(tmp_path / "a.csv"), "y", "site").load()
    assert [data.natural_names[i] for i in data.natural] == ["01", "1", "001", "01"]
    # plain numbers keep their order
    (tmp_path / "a.csv").write_text("site,x,y\n10,1,0\n9,2,1\n100,3,0\n")
    data = Csv(str(tmp_path / "a.csv"), "y", "site").load()
    assert data.natural_names == ("9", "10", "100")
    assert data.natural.tolist() == [1, 0, 2]


def test_parquet_columns_of_lists_and_decimals(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"dose": [Decimal("1.5"), Decimal("2.25"), None], "y": [0, 1, 0]})
    frame.to_parquet(tmp_path / "a.parquet")
    data = Csv(str(tmp_path / "a.parquet"), "y", missing="drop").load()
    assert data.columns == ("dose",)
    assert data.train.x.tolist() == [[1.5], [2.25]]
    frame.assign(dose=[[1, 2], [2, 3], [3, 4]]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'dose' holds several values in a cell, such as"):
        Csv(str(tmp_path / "a.parquet"), "y").load()


@pytest.mark.parametrize("kind", ["string", "category"])
def test_parquet_columns_of_text_are_categories(tmp_path, kind):
    pytest.importorskip("pyarrow")
    codes = ["1"] * 20 + ["V45"]
    frame = pandas.DataFrame(
        {"code": pandas.Series(codes, dtype=kind), "ward": [1] * 20 + [2], "y": [0, 1, 2] * 7}
    )
    frame.to_parquet(tmp_path / "t.parquet")
    data = Csv(str(tmp_path / "t.parquet"), "y", categories=("ward",)).load()
    assert data.columns == ("code=1", "code=V45", "ward=1", "ward=2")
    assert data.train.x.tolist() == [[1, 0, 1, 0]] * 20 + [[0, 1, 0, 1]]
    frame["code"] = pandas.Series(["1,5"] * 21, dtype=kind)
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"'code' holds numbers with a decimal comma.*Write them as numbers"):
        Csv(str(tmp_path / "t.parquet"), "y").load()


CODES = "x,code\n" + "".join(f"{i},{code}\n" for i, code in enumerate(("01", "02", "A1", "A2") * 5))
FEW_CODES = "x,code\n" + "".join(f"{i},{code}\n" for i, code in enumerate(("02", "01") * 3))


def test_the_type_of_a_column_does_not_depend_on_the_order_of_many_rows(tmp_path):
    # pandas reads about 2**20 cells at once
    further_columns = 31
    codes = ["01", "02", "A1", "A2"] * 10_000
    head = ",".join(["code", *(f"x{k}" for k in range(further_columns))])
    rows = ",".join(["", *["1"] * further_columns])
    for name, order in (("sorted", sorted(codes)), ("mixed", codes)):
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *(code + rows for code in order)]))
        data = Csv(str(tmp_path / f"{name}.csv"), label="code").load()
        assert data.classes == ("01", "02", "A1", "A2")
        assert torch.bincount(data.train.y).tolist() == [10_000] * 4


def test_a_test_file_has_the_types_of_the_training_file(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text(CODES)
    test.write_text(FEW_CODES)
    data = Csv(str(train), label="code", test=str(test)).load()
    assert data.classes == ("01", "02", "A1", "A2")
    assert data.test.y.tolist() == [1, 0] * 3
    # as a feature, with an empty cell
    test.write_text(FEW_CODES + "9,\n")
    table = Csv(str(train), label="x", test=str(test), missing="mean", task="regression")
    train.write_text(CODES + "99,\n")
    assert table.load().test.inputs[:, :3].argmax(1).tolist()[:6] == [1, 0] * 3
    rows = Csv(str(train), label="x", missing="mean").load_with_rows(str(test))[0].test.inputs
    assert torch.equal(rows, table.load().test.inputs)


def test_a_client_of_a_network_may_lack_the_classes_with_letters(tmp_path):
    (tmp_path / "own.csv").write_text(FEW_CODES)
    classes = ("01", "02", "A1", "A2")
    data = Csv(str(tmp_path / "own.csv"), label="code", classes=classes).load()
    assert (data.classes, data.train.y.tolist()) == (classes, [1, 0] * 3)
    # classes that are numbers are equal to them
    (tmp_path / "own.csv").write_text("x,code\n1,01\n2,2\n")
    assert Csv(str(tmp_path / "own.csv"), label="code", classes=("2", "1")).load().train.y.tolist() == [1, 0]


def test_an_empty_cell_among_truth_values_is_their_mean(tmp_path):
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("a,y\nTrue,0\nFalse,1\nTrue,0\nTrue,1\n")
    test.write_text("a,y\nTrue,0\n,1\nFalse,1\n")
    data = Csv(str(train), label="y", test=str(test), missing="mean").load()
    assert data.test.inputs[:, 0].tolist() == [1.0, 0.75, 0.0]


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("x,y,y\n1,0,0\n2,1,1\n")
    with pytest.raises(DataError, match="several columns 'y'"):
        Csv(str(tmp_path / "t.csv"), label="y").load()


def test_an_empty_client_of_new_rows_is_named_by_its_row(tmp_path):
    (tmp_path / "t.csv").write_text("x,y,c\n1,0,a\n2,1,b\n")
    (tmp_path / "rows.csv").write_text("x,c\n1,a\n2,\n")
    with pytest.raises(DataError, match=r"the column 'c' has 1 empty cell, in row 2 of the data"):
        Csv(str(tmp_path / "t.csv"), label="y", client="c").load_with_rows(str(tmp_path / "rows.csv"))
