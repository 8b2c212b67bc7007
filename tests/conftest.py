"""How all tests run: on one thread, and each claim once unless ``--full`` is given.

``pytest`` leaves out what only ``pytest --full`` (``make test-all``) runs:

- tests marked ``full``: whole products of methods, engines and types, real processes, clusters;
- of a test marked ``few(n)`` all rows but n, taken evenly: its rows are examples of one claim;
- of a test by hypothesis the examples after the first 20, which are the same in every run.

A test that is named on the command line (``file.py::test``) always runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# the site's ledger of privacy of whoever runs the tests stays as it is
os.environ["FEDLOWRANK_STATE"] = f"{tempfile.gettempdir()}/fedlowrank-tests-{os.getpid()}"
# read when torch is imported; processes that tests start inherit them
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedlowrank.engines import vectorized
from fedlowrank.models import standard

torch.set_num_threads(1)

TESTS = Path(__file__).parent

WAITING = ("cli", "engines", "network")
"""Directories whose tests wait for processes, and therefore end after some time."""

COHORTS = (
    *("adapters", "core", "data", "engines", "language"),
    *("methods", "models", "results", "rounds", "training", "trust"),
)
"""Directories whose tests are about clients that are trained as a cohort. Elsewhere the engine chooses as for users."""


@pytest.fixture(scope="module", autouse=True)
def _cohorts_of_two(request: pytest.FixtureRequest) -> Iterator[None]:
    """Form cohorts of two clients and more: the federations of tests are small."""
    with pytest.MonkeyPatch.context() as patch:
        if any(parent.parent == TESTS and parent.name in COHORTS for parent in request.path.parents):
            patch.setattr(vectorized, "MIN_COHORT", 2)
        yield


# no limits of time: machines are busy
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=20, derandomize=True)


@pytest.fixture(scope="session", autouse=True)
def standard_net() -> Iterator[None]:
    """Let engines batch clients that hold the network of ``tests.methods.setting``: its forward pass is
    deterministic."""
    from tests.methods.setting import Net

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard, "LAYERS", standard.LAYERS | {Net})
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a test by hypothesis has."""
    settings.load_profile("full" if config.getoption("--full") else "quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption(
        "--full", action="store_true", help="run every row and every long test, as `make test-all`"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the rows that run, and limit the time of those that wait."""
    for item in items:
        if any(f"tests/{name}/" in item.nodeid for name in WAITING) and not item.get_closest_marker(
            "timeout"
        ):
            item.add_marker(pytest.mark.timeout(300))
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    rows: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and item not in left_out:
            rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in rows.values():
        marker = of_one[0].get_closest_marker("few")
        assert marker is not None
        left_out.update(set(of_one) - set(evenly(of_one, marker.args[0])))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def evenly(rows: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the rows, evenly spaced, the first among them."""
    return [rows[i * len(rows) // count] for i in range(count)] if count < len(rows) else rows
