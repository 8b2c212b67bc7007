"""Files as editors and people write them: encodings, paths of Windows, quotation marks, and typing errors."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.toml_files import read_toml
from fedlowrank.core.errors import ConfigError
from tests.cli.small_experiment import SMALL, refused

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize("data", [SMALL.encode("utf-8-sig"), SMALL.replace("\n", "\r\n").encode(),
                                  SMALL.replace(" = ", "\t=\t").encode()], ids=["mark", "crlf", "tabs"])  # fmt: skip
def test_what_editors_add_changes_nothing(data: bytes) -> None:
    Path("a.toml").write_bytes(data)
    assert read_toml(Path("a.toml")) == tomllib.loads(SMALL)


@pytest.mark.few(13)
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'[data]\r\npath = "C:\\Users\\me"\r\n', (
            'line 2 (path = "C:\\Users\\me")', "path = 'C:\\Users\\me' in single quotes", '"C:/Users/me" with slashes',
        )),
        (b'path = "C:\\data"', ("line 1", "'C:\\data' in single quotes")),
        (b'[data]\npath = "C:\\new\\table"', ("data.path", "'C:\\new\\table' in single quotes")),
        (b'[data]\npath = ["\\\\server\\new"]', ("data.path", "in single quotes")),
        (SMALL.encode("utf-16"), ("UTF-16", "Save it in UTF-8")),
        (SMALL.encode("utf-32"), ("UTF-32",)),
        (SMALL.encode("utf-16-le"), ("line 2 holds a zero byte",)),
        ('a = 1\ntitle = "caf\u00e9"'.encode("latin-1"), ("line 2", "0xe9", "'\u00e9' in Latin-1", "UTF-8")),
        ("a = 1\nname = \u201cx\u201d".encode(), ("line 2", "\u201c is a typographic quotation mark")),
        (b"a = 1\na = 2", ("line 2 (a = 2)", "twice")),
        (b"[run]\n[data]\n[run]", ("line 3 ([run])", "twice")),
        (b"[run]\nname = fedavg", ("line 2", 'name = "fedavg"')),
        (b"[run]\nkeep_best = True", ("line 2", "keep_best = true")),
        (b"a =", ("line 1", "no value")),
        (b"", ("holds no settings",)),
        (b"# nothing", ("holds no settings",)),
    ],
)  # fmt: skip
def test_what_is_wrong_and_what_to_type(data: bytes, says: tuple[str, ...], capsys: Capsys) -> None:
    Path("bad.toml").write_bytes(data)
    actual = refused(capsys, "run", "bad.toml")
    Path("above.toml").write_text('extends = "bad.toml"')
    for text in (actual, refused(capsys, "compare", "above.toml")):
        for part in ("bad.toml", *says):
            assert part in text


def test_a_folder_is_named_as_one(capsys: Capsys) -> None:
    Path("f").mkdir()
    assert "f is a folder; name a TOML file in it" in refused(capsys, "run", "f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[language]\npth = "x"\n[data]\nsource = "dolly"', "language.pth: there is no such field"),
        ('[language]\npath = 5\n[data]\nsource = "dolly"', "language.path: input should be a valid string"),
        ('[language]\npath = "x"\ntask = "c"\n[data]\nsource = "dolly"', "language.task: 'c' is no choice"),
        ('language = "x"\n[data]\nsource = "dolly"', "language must be a table"),
        ('[langauge]\npath = "x"\n[data]\nsource = "dolly"', "there is no section 'langauge'. Did you mean 'language'?"),
        ('[language]\npath = "x"\n[data]\nsorce = "dolly"', "data.sorce: there is no such field. Did you mean data.so"),
        ('[partition]\nkin = "dirichlet"\nalpha = 0.5', "partition.kin: there is no such field. Did you mean partition.k"),
        ('[data]\nsource = "mnist"\npath = "x"\nkepp = 0.5', "Did you mean 'keep'?"),
        ("[split]\nvall = 0.5\n[run]\nrounds = 0", "split.vall: there is no such field"),
        ("[run]\nrounds = true", "run.rounds: input should be a valid integer; it is True"),
        ("[run.privacy]\nnoise = true", "run.privacy.noise: input should be a valid number; it is True"),
        ("[partition]\nclients = true", "partition.clients: input should be a valid integer; it is True"),
        ("[methods.fedavg]\nepochs = true", "methods.fedavg.epochs: input should be a valid integer; it is True"),
    ],
)  # fmt: skip
def test_the_first_error_is_reported_where_it_is(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.parse(tomllib.loads(text))
    assert any(says in line for line in str(error.value).splitlines()[:2])
    assert "needs a section [language]" not in str(error.value)
    assert "gives no texts" not in str(error.value)


def test_errors_of_several_sections_are_reported_in_their_order() -> None:
    text = '[language]\npath = "x"\nmax_lenth = 4\n[data]\nsource = "digitz"\n[split]\nvall = 1\n[run]\nrounds = 0'
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.parse(tomllib.loads(text))
    assert [line.split()[0].split(".")[0] for line in str(error.value).splitlines()] == [
        "language",
        "split",
        "run",
    ]
