"""Protected and attacked runs: the setting in words, privacy spent, honest clients, backdoors, weights of replies."""

import csv
import io
import re
from dataclasses import asdict

import numpy as np
import pytest

from fedlowrank.core.key import Key
from fedlowrank.report import compare_runs, save_figures
from fedlowrank.report.figures import trust_figures
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.report.setting_paragraph import describe_setting
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.rounds.participation.participants import Participants
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Trust
from tests.report.report_runs import (
    cells,
    draw,
    draw_figures,
    legend_of,
    members,
    page_of,
    rounds_of,
    rows_of,
    text_of,
    titles_of,
)

OFF = {**asdict(Trust()), "sampling": "fixed"}
PRIVATE = {"kind": "central", "noise": 1.5, "epsilon": None, "delta": 1e-4, "accountant": "rdp"}


def trusting(**tables):
    """The table ``run`` with everything off but the fields given."""
    return {**OFF, **{k: {**OFF[k], **v} if isinstance(v, dict) else v for k, v in tables.items()}}


def observing(rows, **kinds):
    """The rows with the server metrics of each round; None for a round without."""
    for kind, values in kinds.items():
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row.setdefault("server_metrics", {})[kind] = value
    return rows


def private(values, accuracy=None, noise=1.5):
    """Rows of rounds after which so much privacy was spent."""
    rows = rounds_of([[0.1 * t, 0.2 * t] for t in range(len(values))] if accuracy is None else accuracy)
    return observing(rows, privacy=[{"epsilon": value, "noise": noise} for value in values])


def with_hostile(count, hostile, unseen=()):
    """Rows of ``clients.json`` of an attacked run."""
    return [{**row, "hostile": row["id"] in hostile, "unseen": row["id"] in unseen} for row in members(count)]


def said(run):
    return describe_setting(group_runs([run]))


class TestSetting:
    @pytest.mark.few(5)
    @pytest.mark.parametrize(
        ("tables", "expected"),
        [
            ({"compression": {"uplink": "top_k:0.05 + int8"}}, "compressed: top_k:0.05 + int8, with error feedback."),
            ({"compression": {"uplink": "int8", "error_feedback": False}}, "compressed: int8."),
            ({"clipping": {"norm": 0.5}}, "clipped to a norm of 0.5."),
            ({"clipping": {"norm": 0.5, "quantile": 0.7}}, "norm of 0.5 at first; the bound follows the 0.7 quantile"),
            ({"robust": {"rule": "median", "hostile": 0.3}}, "takes the median of each coordinate of the replies."),
            ({"robust": {"rule": "krum", "hostile": 0.3}}, "takes Krum of the replies, with at most 30 % hostile."),
            ({"robust": {"rule": "median", "weights": "examples"}}, "of the replies, weighed by examples."),
            ({"robust": {"rule": "own"}}, "takes own of the replies."),
            ({"secure": {"on": True, "bits": 16}}, "±8, quantized to 16 bits, the server learns the total, if 66 %"),
            ({"sampling": "poisson"}, "100 % of clients in each, each drawn by itself (Poisson sampling)."),
        ],
    )  # fmt: skip
    def test_says_what_is_on_and_nothing_else(self, make_run, tables, expected):
        plain, text = said(make_run("a", run=OFF)), said(make_run("a", run=trusting(**tables)))
        assert expected in text
        assert len(text.split(". ")) - len(plain.split(". ")) == ("sampling" not in tables)

    def test_over_a_network_the_protocol_sets_how_many_must_reply(self, make_run):
        run = make_run("a", run=trusting(secure={"on": True, "bits": 16}))
        (run.folder / "network.json").write_text("{}")
        text = said(run)
        assert "the server learns the total, if more than two thirds of the clients reply" in text
        assert "66 %" not in text

    @pytest.mark.full
    def test_says_nothing_of_defaults_and_of_runs_that_know_none_of_it(self, make_run):
        assert said(make_run("a")) == said(make_run("a", run=OFF))
        assert not re.search(
            "clip|compress|privacy|hostile|secure|server|Poisson", said(make_run("a", run=OFF))
        )

    @pytest.mark.full
    def test_noise_is_that_of_the_record_where_it_followed_from_the_budget(self, make_run):
        actual = {**PRIVATE, "noise": None, "epsilon": 8.0}
        text = said(make_run("a", rounds=private([0.0, 1.0], noise=0.75), run=trusting(privacy=actual)))
        assert "privacy of clients, central: noise multiplier σ = 0.75, budget ε = 8, δ = 0.0001;" in text
        assert "(accountant rdp)" in text
        text = said(make_run("a", rounds=rounds_of([[0.1]]), run=trusting(privacy=actual)))
        assert "central: budget ε = 8, δ = 0.0001;" in text

    @pytest.mark.few(19)
    @pytest.mark.parametrize("sampling", ["poisson", "fixed"])
    @pytest.mark.parametrize("participation", [0.01, 0.5, 0.8, 0.9, 1.0])
    @pytest.mark.parametrize("unseen", [0.0, 0.5, 0.75])
    def test_names_the_relation_of_the_accountant(self, make_run, sampling, participation, unseen):
        given = {"sampling": sampling, "participation": participation, "unseen": unseen}
        draws = Participants(8, RunSettings(**given), Key((0,)))
        replaces = draws.sampling.relation == "replace_one"
        run = trusting(privacy=PRIVATE, **given)
        people = with_hostile(8, (), draws.unseen)
        text = said(make_run("a", rounds=private([0.0]), run=run, clients=people))
        assert ("other data" in text) == replaces
        assert ("differ by one client" in text) == (not replaces)
        run["privacy"]["kind"] = "local"
        assert "other data" in said(make_run("a", rounds=private([0.0]), run=run, clients=people))

    def test_counts_the_hostile_clients(self, make_run):
        run = trusting(attack={"kind": "backdoor", "target": 3, "strength": None})
        text = said(make_run("a", run=run, clients=with_hostile(10, {2, 5, 7})))
        assert (
            "3 of the 10 clients are hostile: backdoor to class 3. No result counts the hostile clients"
            in text
        )
        run = trusting(attack={"kind": "sign_flip", "strength": 2.0})
        text = said(make_run("a", run=run, clients=with_hostile(10, {2})))
        assert "1 of the 10 clients are hostile: sign flip, strength 2. No result" in text


class TestPrivacy:
    def test_figures_have_a_line_a_private_method(self, make_run):
        rows = private([0.0, 1.5, 2.0, 2.25])
        rows[2]["accuracy"] = None
        run = {"run": trusting(privacy=PRIVATE)}
        runs = [
            make_run("a", rounds=rows, **run),
            make_run("a", 1, rounds=private([0.0, 2.5, 3.0, 3.25]), **run),
        ]
        runs += [make_run("b", rounds=private([0.0, 4.0]), **run), make_run("plain")]
        picture = draw(trust_figures.plot_privacy, *runs)
        assert legend_of(picture) == ["a", "b"]
        one, two = picture.figure.axes[0].lines
        assert one.get_ydata().tolist() == [0, 2.0, 2.5, 2.75]
        assert two.get_ydata().tolist() == [0, 4.0]
        assert "a 2.75, b 4" in picture.alt
        assert "mean over up to 2 seeds" in picture.caption
        picture = draw(trust_figures.plot_private_accuracy, *runs)
        assert legend_of(picture) == ["a", "b"]
        one, two = picture.figure.axes[0].lines
        # round 2 of one seed was not evaluated; means over clients are 0.15 t
        assert one.get_xdata().tolist() == [0, 2.0, 2.75]
        assert one.get_ydata().tolist() == pytest.approx([0, 15, 45])
        assert two.get_ydata().tolist() == pytest.approx([0, 15])
        assert "a 45.00 % at ε = 2.75" in picture.alt

    def test_what_epsilon_is_of_stands_below(self, make_run):
        def caption(*runs):
            made = [make_run(m, rounds=private([0.0, 1.0]), run={**r, "participation": 0.5}) for m, r in runs]
            return draw(trust_figures.plot_privacy, *made).caption

        poisson = trusting(privacy=PRIVATE, sampling="poisson")
        same = caption(("a", poisson), ("b", poisson))
        assert (
            "of the models that the server releases, against the absence of one client, with δ = 0.0001"
            in same
        )
        assert "compare" not in same
        local = trusting(privacy={**PRIVATE, "kind": "local", "delta": 0.01})
        mixed = caption(("a", poisson), ("b", local))
        assert "b: of the client that sent most, against other data of one client, with δ = 0.01" in mixed
        assert "do not compare" in mixed

    def test_the_column_is_what_each_seed_spent_in_the_end(self, make_run):
        run = {"run": trusting(privacy=PRIVATE, rounds=2)}
        long, short = private([0.0, 1.0, 3.0]), private([0.0, 2.0])
        runs = [make_run("a", 0, rounds=long, **run), make_run("a", 1, rounds=short, **run), make_run("b")]
        table = compare_runs(runs)
        assert [row.get("epsilon") for row in rows_of(table)] == [2.5, None]
        assert cells(table, "trust", "ε") == ["2.5", "–"]
        assert "2.5" in text_of(table)

    @pytest.mark.full
    def test_a_clipping_norm_that_follows_is_drawn(self, make_run):
        rows = observing(rounds_of([[0.1]] * 3), clipping=[{"norm": c} for c in (0.5, 0.25, 0.375)])
        picture = draw(trust_figures.plot_clipping_norm, make_run("a", rounds=rows), make_run("b"))
        (line,) = picture.figure.axes[0].lines
        assert line.get_ydata().tolist() == [0.5, 0.25, 0.375]
        assert legend_of(picture) == ["a"]


class TestAttack:
    RUN = trusting(attack={"kind": "backdoor"})

    @pytest.mark.full
    @pytest.mark.parametrize("unseen", [(), (5,)])
    @pytest.mark.usefixtures("words_only")
    def test_results_are_those_of_honest_clients(self, make_run, tmp_path, unseen):
        random = np.random.default_rng(0)
        values = {seed: random.random((3, 6)) for seed in (0, 1)}
        hostile = {0: {1, 4}, 1: {0, 2}}
        runs = [
            make_run("a", s, rounds=rounds_of(values[s].tolist()), run=self.RUN,
                     clients=with_hostile(6, hostile[s], unseen))
            for s in (0, 1)
        ]  # fmt: skip
        honest = [[v for i, v in enumerate(values[s][-1]) if i not in {*hostile[s], *unseen}] for s in (0, 1)]
        (row,) = rows_of(table := compare_runs(runs))
        mean, std = np.mean([np.mean(v) for v in honest]), np.mean([np.std(v) for v in honest])
        assert row["accuracy_last"] == pytest.approx(mean)
        assert row["std_clients"] == pytest.approx(std)
        assert row["worst_tenth"] == pytest.approx(np.mean([min(v) for v in honest]))
        best = [
            max(np.mean([r[i] for i in range(6) if i not in {*hostile[s], *unseen}]) for r in values[s])
            for s in (0, 1)
        ]
        assert row["max_test_over_rounds"] == pytest.approx(np.mean(best))
        assert cells(table, "accuracy", "last round") == [f"{100 * mean:.2f} ± {100 * std:.2f}"]
        assert "that are hostile" in page_of(runs, tmp_path)
        (read,) = csv.DictReader(io.StringIO(to_csv(table)))
        assert float(read["accuracy_last"]) == row["accuracy_last"]
        assert read["clients_hostile"] == "2"

    def test_a_hostile_client_that_was_not_evaluated_is_no_matter(self, make_run):
        rows = rounds_of([[0.1, 0.2, 0.3], [0.5, None, 0.7]])
        (row,) = rows_of(
            compare_runs([make_run("a", rounds=rows, run=self.RUN, clients=with_hostile(3, {1}))])
        )
        assert row["accuracy_last"] == pytest.approx(0.6)
        # the honest client was last evaluated before training
        (row,) = rows_of(
            compare_runs([make_run("a", rounds=rows, run=self.RUN, clients=with_hostile(3, {0, 2}))])
        )
        assert (row["accuracy_last"], row["last_round"]) == (0.2, 0)

    @pytest.mark.full
    def test_success_of_a_backdoor_is_that_of_the_last_evaluation(self, make_run):
        rates = [{"success": 0.1}, {"success": 0.75}, None]
        first = observing(rounds_of([[0.5]] * 3), backdoor=rates)
        second = observing(rounds_of([[0.5]] * 3), backdoor=[None, None, {"success": 0.25}])
        runs = [make_run("a", s, rounds=r, run=self.RUN) for s, r in enumerate((first, second))]
        table = compare_runs(runs)
        assert rows_of(table)[0]["backdoor_success"] == 0.5
        assert cells(table, "trust", "backdoor success") == ["50.00"]

    def test_weight_that_a_rule_gave_to_hostile_clients(self, make_run):
        weights = [None, {"0": 1.0, "1": 0.0, "2": 1.0}, {"1": 0.5, "2": 0.5, "3": 1.0}, None]
        rows = observing(rounds_of([[0.5] * 12] * 4), weight=weights)
        run = trusting(robust={"rule": "multi_krum"}, attack={"kind": "sign_flip"})
        made = make_run("a", rounds=rows, run=run, clients=with_hostile(12, {0, 3}))
        # a half in both rounds that the rule reduced; client 10 has no part in it
        assert rows_of(compare_runs([made]))[0]["hostile_weight"] == pytest.approx(0.5)
        made = make_run("a", rounds=rows, run=run, clients=with_hostile(12, {1, 10}))
        assert rows_of(compare_runs([made]))[0]["hostile_weight"] == pytest.approx(0.125)
        # a rule alone knows no hostile clients
        made = make_run("a", rounds=rows, run=trusting(robust={"rule": "krum"}))
        assert "hostile_weight" not in compare_runs([made]).frame


@pytest.mark.full
def test_nothing_changes_for_runs_without_any_of_it(make_run, tmp_path):
    old, new = make_run("a", 0), make_run("a", 1, run=OFF)
    (group,) = group_runs([old, new])
    assert group.label == "a"
    assert len(group.runs) == 2
    tables = [compare_runs([run]) for run in (old, new)]
    assert list(tables[0].frame) == list(tables[1].frame)
    assert not re.search("honest|hostile|epsilon|backdoor", " ".join(tables[1].frame))
    assert titles_of(tables[0]) == titles_of(tables[1])
    assert "trust" not in tables[1].result_tables
    drawn = [[p.title for _, some in draw_figures([run]) for p in some] for run in (old, new)]
    assert drawn[0] == drawn[1]
    assert not re.search("rivacy|lipping", " ".join(drawn[1]))


@pytest.mark.full
def test_everything_together_on_a_page_and_as_files(make_run, tmp_path):
    rows = private([0.0, 1.0, 2.0], [[0.1, 0.2, 0.3]] * 3)
    observing(rows, clipping=[{"norm": 0.5}] * 3, backdoor=[{"success": 0.5}] * 3)
    run = trusting(
        compression={"uplink": "int8"}, clipping={"norm": 0.5, "quantile": 0.5}, privacy=PRIVATE,
        attack={"kind": "backdoor"},
    )  # fmt: skip
    runs = [make_run(m, s, rounds=rows, run=run, clients=with_hostile(3, {1})) for m in "ab" for s in (0, 1)]
    page = page_of(runs, tmp_path)
    for text in (
        "Updates are compressed", "Privacy and attacks", "backdoor success", "Privacy spent over rounds",
        "Accuracy over privacy spent", "Clipping norm over rounds", "1 of the 3 clients are hostile",
    ):  # fmt: skip
        assert text in page
    made = {path.stem for path in save_figures(runs, tmp_path / "f", ["svg"])}
    assert {"privacy-spent-over-rounds", "accuracy-over-privacy-spent", "clipping-norm-over-rounds"} <= made
