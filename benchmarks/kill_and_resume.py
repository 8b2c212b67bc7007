"""A run killed in the middle of a round and resumed, against the same run unbroken.

    python benchmarks/kill_and_resume.py FILE.toml [section.field=value ...]

Runs the file's method twice. The second time its process is killed (SIGKILL) during the third round, some seconds after the
second ended, and resumed. With run.lost_replies above 0 clients are lost in mid-round too: their training is done and their
reply never arrives, so they go on from the state before. The states of server and clients must be equal bit for bit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedlowrank.core import tree
from fedlowrank.simulation import checkpoint
from fedlowrank.simulation.records import RunRecord

COMMAND = [sys.executable, "-m", "fedlowrank.cli.main"]


def rounds(folder: Path) -> int:
    """Rounds that a run has recorded."""
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def main(arguments: list[str]) -> int:
    """Run, kill, resume, compare."""
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        subprocess.run([*COMMAND, "run", *arguments, "-o", str(whole)], check=True, stdout=subprocess.DEVNULL)
        process = subprocess.Popen(
            [*COMMAND, "run", *arguments, "-o", str(broken)], stdout=subprocess.DEVNULL
        )
        while rounds(broken) < 2 and process.poll() is None:
            time.sleep(0.01)
        seconds = RunRecord.load(broken).rounds[2].seconds["train"] / 2
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        print(
            f"killed {seconds:.1f} s into the third round: exit code {code}, {rounds(broken)} rounds recorded"
        )
        subprocess.run([*COMMAND, "resume", str(broken)], check=True, stdout=subprocess.DEVNULL)
        a, b = (checkpoint.load(folder / "checkpoint") for folder in (whole, broken))
        records = [[r.untimed() for r in RunRecord.load(folder).rounds] for folder in (whole, broken)]
        lost = {r["round"]: sorted(r["lost"]) for r in records[0] if r["lost"]}
        print(f"rounds: {a.round}; clients whose reply was lost, by round: {lost}")
        same = (
            tree.equal(a.server, b.server),
            a.clients.keys() == b.clients.keys()
            and all(tree.equal(a.clients[i], b.clients[i]) for i in a.clients),
            records[0] == records[1],
        )
        print("server {}, clients {}, records {}".format(*("equal" if s else "DIFFERENT" for s in same)))
        return 0 if all(same) and code == -signal.SIGKILL else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
