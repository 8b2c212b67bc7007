"""The code of the documentation runs as a reader would run it, and quoted numbers are those of the results pages."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.models.zoo import ModelSettings

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    actual: list[str] = re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert actual
    return actual


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the Python blocks of a page from top to bottom, and returns the lines that they print."""
    monkeypatch.chdir(tmp_path)

    def run(page: str) -> list[str]:
        scope: dict[str, object] = {"__name__": "page"}
        torch.manual_seed(0)
        for text in blocks(page, "python"):
            exec(compile(text, page, "exec"), scope)
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.full
def test_get_started(printed) -> None:
    accuracy, sent = printed("get-started.md")[0].split()
    assert 0 <= float(accuracy) <= 1
    # five clients: an adapter of 8 + 1 to 4 and 4 + 1 to 3, in float32, with its header
    assert 5 * 4 * (9 * 4 + 5 * 3) < int(sent) < 5 * 4 * (9 * 4 + 5 * 3) + 5 * 1000


@pytest.mark.full
def test_compare_methods(printed) -> None:
    accuracy = ast.literal_eval(printed("tutorials/compare-methods.md")[0])
    assert accuracy["fedavg"] < accuracy["fedrep"] - 0.1
    assert accuracy["fedavg"] < accuracy["standalone"] - 0.1
    first, variants = (tomllib.loads(text) for text in blocks("tutorials/compare-methods.md", "toml"))
    made = ExperimentConfig.parse(first)
    assert made.compared_methods == ["pfedlora", "standalone", "fedproto"]
    assert made.build_method("pfedlora").mu == 0.9
    both = ExperimentConfig.parse({"name": "x", "data": {"source": "digits"}, **variants})
    assert both.build_method("floral_known").router.routing == "optimal"


def test_bring_your_model(printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy, steps, sent, taught = printed("tutorials/bring-your-model.md")
    assert 1 / 3 < float(accuracy) <= 1
    assert 1 / 3 < float(taught) <= 1
    # two rounds of one batch of 64 examples
    assert int(steps) == 2
    assert int(sent) == 6 * (32 * 3 + 3)
    (code,) = [text for text in blocks("tutorials/bring-your-model.md", "python") if "def factory" in text]
    (tmp_path / "documented_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("documented_module:factory",)
    make = ModelSettings(names=names).factories((5,), 3)[names[0]]
    assert make()(torch.zeros(2, 5)).shape == (2, 3)


@pytest.mark.full
def test_deploy(printed) -> None:
    ranks, size, same, equal, *latencies = printed("tutorials/deploy-a-thin-model.md")
    before, after = map(int, size.split(" -> "))
    # 12·64 + 64 + 64·8 + 8 + 8·3 + 3 numbers in float32
    assert before == 4 * 1379
    assert after < before
    # the full ranks are 12, 8 and 3
    actual = ast.literal_eval(ranks)
    assert actual.keys() == {"0.weight", "2.weight", "4.weight"}
    assert actual["0.weight"] < 12
    assert actual["2.weight"] < 8
    assert f"{after:,} of {before:,} bytes" in (DOCS / "tutorials" / "deploy-a-thin-model.md").read_text()
    assert (same, equal) == ("True", "True")
    assert [line.split()[0] for line in latencies] == ["dense", "thin"]


@pytest.mark.full
def test_floral(printed) -> None:
    *budget, routes = printed("how-to/floral.md")
    assert budget[-1] == "The base has 1,379 numbers. Not adapted: none."
    assert sum(json.loads(routes)) == pytest.approx(1)


@pytest.mark.full
def test_lora(printed) -> None:
    ranked, weights, frozen = printed("how-to/lora.md")
    assert all(0 <= float(share) <= 1 for share in ranked.split())
    match = re.match(r"(\{.*\}) (\{.*\})$", weights)
    assert match is not None
    assert sum(ast.literal_eval(match[1]).values()) == pytest.approx(1)
    assert ast.literal_eval(match[2]).keys() == {"0", "2"}
    # B and A of rank 4 of 64 x 12 and 8 x 64, and the head 3 x 8 with its constant, from each of 5 clients
    assert int(frozen) == 5 * (4 * (64 + 12) + 4 * (8 + 64) + 27)


def test_language_models() -> None:
    made = ExperimentConfig.parse(tomllib.loads(blocks("how-to/language-models.md", "toml")[0]))
    assert made.build_method("fedhl").title == "FedHL"
    assert made.partition.clients == 10


def test_which_method_quotes_the_results_pages() -> None:
    """Every `a ± b` is on a results page that the page cites, where it may have one digit more."""
    text = (DOCS / "which-method.md").read_text()
    quoted = re.findall(r"(\d+\.\d) ± (\d+\.\d)", text)
    assert len(quoted) > 20
    pages = " ".join((DOCS / path).read_text() for path in set(re.findall(r"\]\((results/[\w-]+\.md)", text)))
    known = [tuple(map(float, pair)) for pair in re.findall(r"(\d+\.\d+) ± (\d+\.\d+)", pages)]
    for mean, half in quoted:
        assert any(abs(float(mean) - m) < 0.0501 and abs(float(half) - h) < 0.0501 for m, h in known), (
            f"{mean} ± {half} is on no results page"
        )
