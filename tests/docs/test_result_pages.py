"""Numbers on the pages of results, computed again from what is in the repository."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from torch import nn

from fedlowrank.config.experiment import ExperimentConfig

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = ("fedhl", "floral", "pfedlora", "fedslr", "robustness", "bytes")


def page(name: str) -> str:
    """The text of a page, a line break as a space."""
    return " ".join((RESULTS / f"{name}.md").read_text().split())


def tables(name: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Head and rows of every table of a page."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    for is_table, found in itertools.groupby(lines, lambda line: line.startswith("|")):
        if is_table:
            head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found)
            yield head, rows


def script(name: str, folder: str = "docs"):
    """A module of ``docs/`` or of another folder."""
    found = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def half_width(values) -> float:
    """Half-width of the 95 % interval of a mean, by the textbook."""
    return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], list[dict[str, float]]]:
    """The rows of the CSV file by experiment and method, seeds in order."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with (RESULTS / "fedhl_small.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = {
                key: float(row[key])
                for key in ("seed", "per_client", "server", "worst", "bytes_up", "bytes_down")
            }
            found.setdefault((row["experiment"], row["method"]), []).append(numbers)
    return found


class TestFedHL:
    def test_the_page_has_what_the_script_prints(self, capsys):
        printed = script("fedhl_table")
        printed.main(None)
        lines = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith(("|", "###", "Ranks"))
        ]
        written = (RESULTS / "fedhl.md").read_text().splitlines()
        assert len(lines) > 40
        # the section on Dolly has a heading of its own
        assert [line for line in lines if line not in written] == ["### Dolly on a 260k-parameter Llama"]

    @pytest.mark.parametrize(("experiment", "method", "label"), [
        ("agnews-high", "fedhl", "FedHL"), ("banking77-moderate", "hetlora", "HetLoRA"), ("agnews-high", "flexlora", "FlexLoRA"),
    ])  # fmt: skip
    def test_means_and_intervals_by_the_textbook(self, runs, experiment, method, label):
        cells = []
        for field in ("per_client", "server", "worst"):
            values = [100 * row[field] for row in runs[experiment, method]]
            cells.append(f"{np.mean(values):.1f} ± {half_width(values):.1f}")
        assert f"| {label} | {' | '.join(cells)} |" in (RESULTS / "fedhl.md").read_text()

    def test_how_far_the_server_is_behind(self, runs):
        gaps = {
            experiment: [100 * (row["per_client"] - row["server"]) for row in rows]
            for (experiment, method), rows in runs.items()
            if method == "fedhl" and not experiment.endswith("stories")
        }
        behind = sum(gap > 1e-9 for each in gaps.values() for gap in each)
        means = [np.mean(each) for each in gaps.values() if len(each) > 1]
        (alone,) = [each[0] for each in gaps.values() if len(each) == 1]
        assert (
            f"behind its clients' own models in {behind} of {sum(map(len, gaps.values()))} runs, by {min(means):.1f} to "
            f"{max(means):.1f} points in the mean with unequal ranks and by {alone:.1f} in the one run with equal ranks. No "
            "interval over seeds leaves out 0."
        ) in page("fedhl")
        assert all(abs(np.mean(each)) < half_width(each) for each in gaps.values() if len(each) > 1)

    def test_which_differences_of_methods_are_established(self, runs):
        found, established = 0, []
        for (one, a), (other, b) in itertools.combinations(
            sorted(key for key, rows in runs.items() if len(rows) > 1), 2
        ):
            for field in ("per_client", "server") if one == other else ():
                gaps = [x[field] - y[field] for x, y in zip(runs[one, a], runs[one, b], strict=True)]
                found += 1
                if abs(np.mean(gaps)) > half_width(gaps):
                    established.append((one, a, b, field, f"{np.mean(gaps):.3f} ± {half_width(gaps):.3f}"))
        assert found == 60
        assert established == [("dolly-stories", "fedhl", "flexlora", "per_client", "0.008 ± 0.004")]
        assert f"make {found} differences" in page("fedhl")
        assert "FlexLoRA's loss on Dolly is 0.008 ± 0.004 below FedHL's" in page("fedhl")


class TestFloral:
    def cells(self):
        """Stem, place of the method, and mean, spread, the paper's mean and spread of every cell of Table 1."""
        head, rows = next(table for table in tables("floral") if table[0][1] == "mnist-r (paper)")
        stems = [title.removesuffix(" (paper)") for title in head[1:]]
        for place, row in enumerate(rows):
            for stem, cell in zip(stems, row[1:], strict=True):
                found = re.fullmatch(r"([\d.]+) ± ([\d.]+) \(([\d.]+) ± ([\d.]+)\), n = 3", cell)
                assert found is not None, cell
                yield stem, place, row[0], tuple(float(number) for number in found.groups())

    def test_the_papers_numbers_are_those_of_the_files(self):
        spread = script("floral_table").SPREAD
        found = list(self.cells())
        assert len(found) == 32
        for stem, place, _, (_, _, paper, papers_spread) in found:
            reference = tomllib.loads((ROOT / "experiments" / "floral" / f"{stem}.toml").read_text())[
                "reference"
            ]
            assert paper == list(reference["accuracy"].values())[place]
            assert papers_spread == spread[stem][place]

    def test_the_papers_spread_of_a_local_adaptor(self):
        """From Table 1 of the paper: Local Adaptor on reduced MNIST-LS has 32.0 ± 2.3."""
        assert next(
            numbers[2:] for stem, _, method, numbers in self.cells() if (stem, method) == ("mnist-ls-reduced", "Local Adaptor")
        ) == (32.0, 2.3)  # fmt: skip

    def test_agreement_counts_either_way(self):
        gaps = [round(mean - paper, 1) for *_, (mean, _, paper, _) in self.cells()]
        within = sum(abs(gap) <= 1 for gap in gaps)
        above, below = sum(gap > 1 for gap in gaps), sum(gap < -1 for gap in gaps)
        said = page("floral")
        assert (
            f"Of the 32 means {within} are within one point of the paper's, {above} are more than one point above it and "
            f"{below} more than one point below."
        ) in said
        listed = said[said.index("- Above:") : said.index("What holds of the paper")]
        numbers = [float(text.replace("−", "-")) for text in re.findall(r"\(([+−][\d.]+)\)", listed)]
        assert sorted(numbers) == sorted(gap for gap in gaps if abs(gap) > 1)


class TestPFedLoRA:
    def test_parameters_of_a_round(self):
        rows = next(rows for head, rows in tables("pfedlora") if head[:2] == ["data", "width"])
        assert len(rows) == 6
        for data, width, adapter, prototypes, ratio in rows:
            classes, own = {"CIFAR-10": (10, 2), "CIFAR-100": (100, 10)}[data]
            layers = nn.Linear(500, int(width)), nn.Linear(int(width), classes)
            there_and_back = 2 * sum(p.numel() for layer in layers for p in layer.parameters())
            of_prototypes = 500 * (classes + own)
            assert adapter == f"{there_and_back:,}"
            assert prototypes == f"{of_prototypes:,}"
            assert ratio == f"{there_and_back / of_prototypes:.2f}"


@pytest.fixture(scope="module")
def robustness():
    """The script, and the runs of the protocol as it stands in the experiment's file."""
    made = script("robustness", "benchmarks")
    return made, made.read(RESULTS / "robustness.jsonl", made.digest(ExperimentConfig.read(made.EXPERIMENT)))


class TestRobustness:
    def test_the_page_has_what_the_script_writes(self, robustness):
        made, cells = robustness
        written = (RESULTS / "robustness.md").read_text().splitlines()
        lines = [line for line in made.sections(cells) if "torch" not in line]
        assert len(lines) > 50
        assert [line for line in lines if line not in written] == []

    def test_every_run_of_the_plan_is_there(self, robustness):
        made, cells = robustness
        for method, (attacks, rules) in made.PLAN.items():
            for attack, rule in itertools.product(attacks, rules):
                assert sorted(cells[method, attack, rule]) == [0, 1, 2]

    def test_mean_and_interval_by_the_textbook(self, robustness):
        _, cells = robustness
        values = [100 * row["accuracy"] for row in cells["fedavg", "none", "mean"].values()]
        cell = f"{np.mean(values):.1f} ± {half_width(values):.1f}"
        head, rows = next(tables("robustness"))
        assert dict(zip(head, rows[0], strict=True))["mean"] == cell


class TestBytes:
    def rows(self):
        """The runs of the page."""
        return [json.loads(line) for line in (RESULTS / "bytes.jsonl").read_text().splitlines()]

    def test_the_page_has_the_table_of_the_runs(self):
        table = script("bytes", "benchmarks").write_table(self.rows())
        assert "\n".join(table) in (RESULTS / "bytes.md").read_text()

    def test_an_interval_by_the_textbook(self):
        found = [row for row in self.rows() if row["method"] == "fedhl" and row["target"] == 1]
        points = [100 * row["accuracy"]["personal"] for row in found]
        assert len(points) == 3
        mean, half = f"{np.mean(points):.1f}", f"{half_width(points):.1f}"
        assert re.search(rf"\| FedHL \| none \| – \| [\d,]+ \| 1\.0 \| {mean} ± {half} \|", page("bytes"))


@pytest.mark.parametrize(("name", "file"), [
    ("pfedlora", "pfedlora/table2-cifar10-n10.toml"), ("fedslr", "results/fedslr.toml"),
])  # fmt: skip
def test_differences_to_the_paper(name, file):
    """Every "difference" is the last round minus the paper's number, which is one of those in the experiment's file."""
    reference = tomllib.loads((ROOT / "experiments" / file).read_text())["reference"]["accuracy"]
    known, checked = {f"{float(value):.2f}" for value in reference.values()}, 0
    for head, rows in tables(name):
        if "difference / points" in head:
            for row in rows:
                cell = dict(zip(head, row, strict=True))
                last = float(cell["last round / %"].split(" ± ")[0])
                assert cell["paper / %"] in known
                assert (
                    cell["difference / points"].replace("−", "-") == f"{last - float(cell['paper / %']):+.2f}"
                )
                checked += 1
    assert checked >= 7


def test_intervals_over_seeds_in_fedslrs_text():
    """Differences given seed by seed have the interval that follows from them."""
    said = page("fedslr")
    for listed in ("+0.3, +0.6 and +1.8 points (mean +0.9, 95 % interval −1.1 to +2.9)",
                   "0.3, 3.2 and 0.7 points (mean 1.4, 95 % interval −2.5 to +5.3)"):  # fmt: skip
        assert listed in said
        numbers = [float(text.replace("−", "-")) for text in re.findall(r"[+−]?\d+\.\d", listed)]
        *seeds, mean, low, high = numbers
        assert np.mean(seeds) == pytest.approx(mean, abs=0.051)
        assert (np.mean(seeds) - half_width(seeds), np.mean(seeds) + half_width(seeds)) == pytest.approx(
            (low, high), abs=0.1
        )


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_intervals_are(name):
    start = page(name)[:900]
    assert "±" in start
    assert "Student's t" in start
    assert re.search(r"\bn = 3|\bn is 5|mean over n seeds", start)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_plainly(name):
    assert re.findall(r"\b(ours|our|we|us)\b|beyond doubt", page(name), re.IGNORECASE) == []
