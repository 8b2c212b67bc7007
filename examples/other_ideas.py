"""Print two lines for each of FedSLR, FedHL and pFedLoRA, from the results in docs/results/evidence.

python examples/other_ideas.py
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from scipy import stats

EVIDENCE = Path(__file__).parents[1] / "docs" / "results" / "evidence"


class Figures:
    """The results of the last round of an experiment.

    Args:
        name: name of the experiment, such as ``fedslr-mnist``.
    """

    def __init__(self, name: str) -> None:
        rows = pd.read_csv(EVIDENCE / f"{name}.csv")
        self._last = rows[rows["round"] == rows["round"].max()]
        self.seeds = self._last["seed"].nunique()
        self.again = f"{self.seeds} seeds: python docs/evidence.py run {name}"

    def accuracy(self, method: str, series: str) -> str:
        """Format the mean test accuracy over seeds, with the half-width of its 95 % interval by Student's t, in %."""
        values = 100 * self._rows(method, series)["test"]
        half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        return f"{values.mean():.1f} ± {half:.1f} %"

    def downlink(self, method: str, series: str) -> str:
        """Format the MB that the server sends in a run, mean over seeds."""
        return f"{self._rows(method, series)['bytes_down'].mean() / 1e6:.3g} MB"

    def _rows(self, method: str, series: str) -> pd.DataFrame:
        return self._last[(self._last["method"] == method) & (self._last["series"] == series)]


def describe_ideas() -> list[str]:
    """Write two lines for each idea: its result, and the result of a baseline."""
    slr, hl, lora = Figures("fedslr-mnist"), Figures("teacher-24"), Figures("pfedlora-digits")
    return [
        f"FedSLR, a low-rank model: {slr.downlink('lam_3e-3', 'mixed')} to the clients, FedAvg "
        f"{slr.downlink('fedavg', 'personal')}; accuracy {slr.accuracy('lam_3e-3', 'mixed')}, "
        f"FedAvg {slr.accuracy('fedavg', 'personal')}.",
        f"  Ditto, the simple baseline, saves nothing: {slr.accuracy('ditto', 'personal')}. {slr.again}",
        f"FedHL, LoRA ranks 16 to 1, a truth of rank 24: server's model {hl.accuracy('fedhl', 'server')}, FlexLoRA "
        f"{hl.accuracy('flexlora', 'server')}, zero padding {hl.accuracy('hetlora', 'server')}.",
        f"  FLoRA sends {hl.downlink('flora', 'server')}, not {hl.downlink('fedhl', 'server')}: "
        f"{hl.accuracy('flora', 'server')}. {hl.again}",
        f"pFedLoRA, five architectures that share an adapter: {lora.accuracy('pfedlora', 'personal')}. "
        "It has to beat clients that train alone.",
        f"  It does not here: Standalone {lora.accuracy('standalone', 'personal')}, FD "
        f"{lora.accuracy('fd', 'personal')}. {lora.again}",
    ]


if __name__ == "__main__":
    print("\n".join(describe_ideas()))
