"""What a site and an operator use: the policy of a site, the table of clients, and a trial on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedlowrank.cli.deployment import network_commands as commands
from fedlowrank.cli.deployment.poc import EXPERIMENT, choose_clients, run_processes
from fedlowrank.cli.deployment.status import clients_table
from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.io.atomic_files import write_json
from fedlowrank.network.client import ClientRuntime
from fedlowrank.network.messages import Order
from fedlowrank.network.operation.policy import Policy, list_upload_paths
from fedlowrank.network.site.audit_log import SiteAudit
from fedlowrank.storage.lock import exclusive
from tests.network.deployments import make_deployment_tables, write_tables
from tests.support.local_network import (
    LocalTransport,
    fault_on_orders,
    local,
    replace_fields,
    serve_run,
    small,
    until,
)

# -- a site's policy


def violated(method: str = "fedavg", examples: int = 40, **fields: Any) -> list[str]:
    run = fields.pop("run", {})
    made = small(method, run=run)
    policy = Policy(**fields)
    return policy.find_violations(made, 3, examples, lambda: ["model/head.weight", "control/head.weight"])


DP = {"clipping": {"norm": 1.0}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"methods": ("fedprox", "fedhl")}, "methods: fedavg is not among fedprox, fedhl"),
        ({"max_rounds": 2}, "max_rounds: the run has 3 rounds, above 2"),
        ({"min_examples": 41}, "min_examples: the site has 40 training examples, below 41"),
        ({"min_clients": 4}, "min_clients: the federation has 3 clients, below 4"),
        ({"evaluation": False}, "evaluation: accuracies and losses would leave the site"),
        ({"parts": ("model/*",)}, "parts: control/head.weight would leave the site"),
        ({"parts": ()}, "parts: model/head.weight, control/head.weight would leave the site"),
        ({"secure": True}, "secure: the server would see this site's update; run.secure.on is needed"),
        ({"privacy": "central"}, "privacy: run.privacy.kind is none; central is needed at least"),
        ({"max_epsilon": 1.0}, "max_epsilon: run.privacy sets no epsilon; at most 1 is allowed"),
        (
            {"privacy": "local", "run": {**DP, "privacy": {"kind": "central", "noise": 1.0, "delta": 1e-3}}},
            "privacy: run.privacy.kind is central; local is needed at least",
        ),
        (
            {"max_epsilon": 1.0, "run": {**DP, "privacy": {"kind": "local", "epsilon": 2.0, "delta": 1e-3}}},
            "max_epsilon: run.privacy.epsilon is 2, above 1",
        ),
        (
            {"max_delta": 1e-5, "run": {**DP, "privacy": {"kind": "local", "epsilon": 2.0, "delta": 1e-3}}},
            "max_delta: run.privacy.delta is 0.001, above 1e-05",
        ),
    ],
)
def test_what_a_policy_does_not_allow(fields: dict[str, Any], why: str) -> None:
    (actual,) = violated(**fields)
    assert actual.startswith(why)


@pytest.mark.parametrize(
    ("name", "base", "allowed", "why"),
    [
        ("fedper", "fedavg", "fedper", "methods: fedavg (as the variant fedper) is not among fedper"),
        ("mine", "fedprox", "fedavg", "methods: fedprox (as the variant mine) is not among fedavg"),
        ("mine", "fedavg", "fedavg", ""),
        ("fedper", "fedavg", "fedavg", ""),
        ("fedper", "", "fedper", ""),
    ],
)
def test_a_policy_names_methods_whatever_an_experiment_calls_them(
    name: str, base: str, allowed: str, why: str
) -> None:
    made = small(name, methods={name: {"method": base}})
    assert Policy(methods=(allowed,)).find_violations(made, 3, 40, list) == ([why] if why else [])


def test_what_a_policy_allows() -> None:
    private = {**DP, "privacy": {"kind": "local", "epsilon": 2.0, "delta": 1e-5}}
    assert violated() == []
    assert violated(
        methods=("fedavg",), max_rounds=3, min_examples=40, min_clients=3, parts=("*/head.*",), evaluation=False,
        privacy="central", max_epsilon=2.0, max_delta=1e-5, run=private,
    ) == []  # fmt: skip


def test_a_policy_names_the_tensors_that_leave(tmp_path: Path) -> None:
    made = small("scaffold")
    carrier = local(made, tmp_path)
    sent: list[Any] = []

    def act(there: LocalTransport, message: Any, t: int, client: int) -> Any:
        actual = there.answered(message)
        sent.extend([tree.decode(actual.payload)] if actual.payload else [])
        return [actual]

    carrier.fault = fault_on_orders(act)
    serve_run(carrier, made, tmp_path / "run")
    assert sorted(list_upload_paths(carrier.folders[100])) == sorted(
        p.lstrip("/") for p, _ in tree.leaves(sent[0])
    )


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Join as client 0; the node is not started, and whether it would be is returned."""
    started: list[Path] = []
    monkeypatch.setattr(commands, "supervise", lambda node, stop: started.append(node.folder))
    file = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg"))

    def call(*options: str) -> bool:
        started.clear()
        main(
            [
                "join",
                str(file),
                "--client",
                "0",
                "--insecure",
                "--folder",
                str(tmp_path / "c"),
                "--stay",
                *options,
            ]
        )
        return bool(started)

    return call


def test_join_keeps_to_the_policy_of_its_site(
    join: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["fedavg"]\nmax_rounds = 1\nmin_examples = 41\n')
    assert not join("--policy", str(policy))
    said = capsys.readouterr().err
    assert "nothing was sent" in said
    assert "max_rounds: the run has 2 rounds, above 1" in said
    assert "min_examples: the site has 40 training examples, below 41" in said
    assert not (tmp_path / "c" / "policy.json").exists()
    policy.write_text('parts = ["head.*"]\n')
    assert not join("--policy", str(policy))
    assert "parts: body." in capsys.readouterr().err
    policy.write_text("max_rounds = 2\n")
    assert join("--policy", str(policy))
    stored = json.loads((tmp_path / "c" / "policy.json").read_text())
    assert stored["policy"]["max_rounds"] == 2
    assert stored["policy_digest"] == Policy(max_rounds=2).digest
    events = [json.loads(line) for line in (tmp_path / "c" / "audit.jsonl").read_text().splitlines()]
    assert [(e["event"], e["digest"]) for e in events] == [("policy", stored["policy_digest"])]
    assert json.loads(events[0]["text"]) == stored["policy"]
    # it holds for later joins with that folder
    assert join()
    write_json(tmp_path / "c" / "policy.json", {**stored, "policy": {"max_rounds": 9}})
    assert not join()
    assert "is damaged" in capsys.readouterr().err


def test_a_join_that_is_refused_changes_nothing_in_the_folder(
    join: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert join("--no-evaluation")
    folder = tmp_path / "c"

    def content() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    before = content()
    assert json.loads(before["client.json"])["site"]["evaluation"] == "none"
    # another process works in the folder
    with exclusive(folder / "flower"):
        assert not join("--exact-evaluation")
    assert "is in use by process" in capsys.readouterr().err
    assert content() == before
    for text in ("max_rounds = 1\n", 'parts = ["head.*"]\n'):
        (tmp_path / "policy.toml").write_text(text)
        assert not join("--exact-evaluation", "--policy", str(tmp_path / "policy.toml"))
        assert "does not allow this experiment" in capsys.readouterr().err
        assert content() == before
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["flower"]
    assert join("--exact-evaluation")
    assert json.loads(content()["client.json"])["site"]["evaluation"] == "exact"


@pytest.mark.parametrize("stays", [True, False])
def test_join_prints_why_the_server_rejects_it_and_ends_unless_it_stays(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg")), tmp_path / "c"

    def supervise(node: Any, stop: threading.Event) -> None:
        # that of an earlier start does not count
        assert not (folder / "rejected.txt").exists()
        (folder / "rejected.txt").write_text("client 0 has other columns")
        if stays:
            until(lambda: not (folder / "rejected.txt").exists(), 20)
            assert not stop.is_set()
        else:
            assert stop.wait(20)

    monkeypatch.setattr(commands, "supervise", supervise)
    folder.mkdir(mode=0o700)
    (folder / "rejected.txt").write_text("of before")
    command = ["join", str(file), "--client", "0", "--insecure", "--folder", str(folder)]
    assert main([*command, "--stay"] if stays else command) == (0 if stays else 1)
    said = " ".join(capsys.readouterr().err.split())
    assert "the server does not let this client take part: client 0 has other columns" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rounds_at_most = 3\n", "policy"),
        ('methods = ["fedavgg"]\n', "there is no method 'fedavgg'"),
        ("min_examples = 0\n", "min_examples must be >= 1"),
        ('privacy = "much"\n', "policy.privacy"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        Policy.read(tmp_path / "p.toml")


def test_a_policy_that_is_missing_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no policy file .*p\.toml"):
        Policy.read(tmp_path / "p.toml")


def test_join_prints_that_a_download_was_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write_tables(tmp_path / "t.toml", make_deployment_tables("fedavg")), tmp_path / "c"
    said: list[str] = []

    def supervise(node: Any, stop: threading.Event) -> None:
        order = Order("0123456789abcdef", 0, 0, True, False)
        answer, _ = ClientRuntime(folder).answer(order, bytes((1 << 20) + 1))
        assert "a download of 1048577 bytes came" in answer.problem
        # of another kind, and half a line
        SiteAudit(folder / "audit.jsonl").log_refusal("order", "an order of another run")
        with (folder / "audit.jsonl").open("a") as log:
            log.write('{"why": "--max-down')

        def says() -> bool:
            said.append(" ".join(capsys.readouterr().err.split()))
            return "a download" in said[-1]

        until(says, 20)

    monkeypatch.setattr(commands, "supervise", supervise)
    command = [
        "join",
        str(file),
        "--client",
        "0",
        "--insecure",
        "--folder",
        str(folder),
        "--max-download",
        "1",
    ]
    assert main(command) == 0
    text = "".join(said)
    assert text.count("a download of 1048577 bytes came; at most 1048576 are taken") == 1
    assert "join with a larger --max-download" in text
    assert "another run" not in text


# -- what an operator sees


def test_status_shows_the_last_reply_of_each_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = small("fedavg", 4, rounds=3, network={"limits": {"ban_after": 1}})
    sizes: dict[int, int] = {}

    def act(carrier: LocalTransport, message: Any, t: int, client: int) -> Any:
        if client == 1 and t >= 2:
            return []
        actual = carrier.answered(message)
        if client == 2 and t == 2:
            actual = replace_fields(actual, payload=b"lies")
        # the last replies of all only answer that the run is over
        if t <= 3:
            sizes[client] = len(actual.header) + len(actual.payload)
        return [(4.5 if client == 3 else 0.0, actual)]

    serve_run(local(made, tmp_path, fault_on_orders(act)), made, tmp_path / "run")
    table = clients_table(tmp_path / "run")
    assert table is not None
    rows = [*zip(*(column.cells for column in table.columns), strict=True)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2].split(",")[0] for row in rows] == ["round 3", "round 1", "round 2", "round 3"]
    assert "not used" in rows[2][2]
    assert [int(row[3].replace(",", "")) for row in rows] == [sizes[i] for i in range(4)]
    assert float(rows[3][4]) == pytest.approx(4.5, abs=1)
    assert [row[7] for row in rows] == [
        "",
        "missed 2 orders in a row",
        "on the blocklist: 1 replies refused",
        "",
    ]
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "blocklist" in capsys.readouterr().out
    assert clients_table(tmp_path) is None


# -- a trial on one machine


def test_all_processes_of_a_trial_end_with_it(tmp_path: Path) -> None:
    asleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), run_processes([asleep, asleep, asleep]) as started:
        raise KeyboardInterrupt
    assert [p.poll() for p in started] == [-signal.SIGTERM] * 3
    # one that cannot be started ends the others
    before = time.monotonic()
    with pytest.raises(FileNotFoundError), run_processes([asleep, [str(tmp_path / "nothing")]]):
        pass
    assert time.monotonic() - before < 60


def test_how_many_sites_a_trial_has(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(EXPERIMENT)
    assert choose_clients(file, None) == ["partition.clients=3"]
    assert choose_clients(file, 5) == ["partition.clients=5"]
    file.write_text(EXPERIMENT + "[network]\nclients = 3\n")
    assert choose_clients(file, 4) == ["partition.clients=4", "network.clients=4"]
    with pytest.raises(ConfigError, match="--clients 0"):
        choose_clients(file, 0)


def test_a_trial_does_not_touch_a_folder_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["poc", "-o", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.full
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_trial_with_real_processes(interrupted: bool, tmp_path: Path, no_process_left: None) -> None:
    out = tmp_path / "poc"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlowrank", "poc", "-o", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    if interrupted:
        until(lambda: (out / "run.flower" / "server.log").exists(), 200)
        process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=500)
    if interrupted:
        assert process.returncode == 130
        return
    assert process.returncode == 0, said
    assert "3 sites, 3 models" in said
    assert torch.isfinite(ClientRuntime(out / "sites" / "0").data.train.x).all()
