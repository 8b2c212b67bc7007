import gzip
import itertools
import json
import os
import shutil
import subprocess
import time
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.language.scores import humaneval, sandbox
from fedlowrank.language.scores.sandbox import Isolation, ProgramLimits, run_program

QUICK = ProgramLimits(seconds=20.0)
PROBLEM = {
    "task_id": "own/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}


def run(program, **limits):
    return run_program(program, ProgramLimits(**{"seconds": 20.0, **limits}))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("completion", "outcome", "message"),
    [
        ("    return 2 * x\n", "passed", ""),
        ("    return 2 * x\n\ndef more():\n    this is cut away\n", "passed", ""),
        ("    return x + 2\n", "failed", "AssertionError"),
        ("    raise ValueError('no')\n", "failed", "ValueError: no"),
        ("    return 2 *\n", "failed", "SyntaxError: invalid syntax"),
        ("    import os\n    os._exit(0)\n", "failed", "ended before its last line"),
        ("    exit(0)\n", "failed", "NameError: name 'exit' is not defined"),
        ("    raise SystemExit(0)\n", "failed", "ended before its last line"),
        ("    return double(x)\n", "failed", "RecursionError: maximum recursion depth exceeded"),
        ("    import numpy\n", "failed", "ModuleNotFoundError: No module named 'numpy'"),
        ("    return input()\n", "failed", "EOFError: EOF when reading a line"),
        ("    import os\n    os.abort()\n", "failed", "ended with code"),
    ],
)
def test_how_completions_end(completion, outcome, message):
    ((found,),) = humaneval.grade_completions([PROBLEM], [[completion]], QUICK)
    assert found.outcome == outcome
    assert found.message.startswith(message)


def test_an_endless_loop_is_stopped_by_the_clock_and_by_the_processor_time():
    began = time.monotonic()
    assert run("while True: pass", seconds=1.0).outcome == "timed out"
    assert run("import time; time.sleep(60)", seconds=0.5).outcome == "timed out"
    assert time.monotonic() - began < 15


@pytest.mark.full
def test_a_program_sees_nothing_of_the_environment_nor_of_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "42")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "os_like.py").write_text("x = 1")
    # Python itself names its locale there
    assert run("import os\nassert set(os.environ) <= {'LC_CTYPE'}, os.environ").passed
    assert run("import os\nassert os.listdir('.') == ['program.py'], os.listdir('.')").passed
    assert run("import os_like").message == "ModuleNotFoundError: No module named 'os_like'"
    assert run(
        "import sys\nassert sys.stdin.read() == '' and sys.argv[1:] == [] and sys.flags.no_site"
    ).passed


@pytest.mark.full
def test_open_files_of_the_caller_are_closed_and_its_folder_is_removed(tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert run(f"import os\nos.fstat({file.fileno()})").message.startswith("OSError: [Errno 9]")
    # a program's own complaint is the one way by which it can tell us where it was
    found = run("import os; os.makedirs('a/b'); os.chmod('a', 0); raise ValueError(os.getcwd())")
    folder = found.message.removeprefix("ValueError: ")
    assert folder.startswith("/")
    assert not os.path.exists(folder)  # noqa: PTH110


def test_limits_are_those_given():
    for name, limit in {"CPU": 20, "AS": 1 << 30, "FSIZE": 1 << 24, "CORE": 0, "NPROC": 1}.items():
        ask = f"import resource as r\nassert r.getrlimit(r.RLIMIT_{name}) == ({limit}, {limit})"
        assert run(ask, seconds=19.5).passed
    assert run("x = 1", memory=1 << 26, file_size=1 << 12).passed
    for wrong in ({"seconds": 0.0}, {"seconds": float("inf")}, {"memory": 1 << 25}, {"file_size": 9}):
        with pytest.raises(ConfigError):
            ProgramLimits(**wrong)


@pytest.mark.full
def test_memory_and_files_are_limited():
    assert run("x = bytearray(1 << 29)", memory=1 << 28).message == "MemoryError"
    assert run("x = bytearray(1 << 27)", memory=1 << 30).passed
    for write in ("open('x', 'wb').write(b'0' * (1 << 21))", "print('0' * (1 << 21), flush=True)"):
        assert run(write, file_size=1 << 20).message == "OSError: [Errno 27] File too large"
        assert run(write, file_size=1 << 22).passed


@pytest.mark.full
def test_no_process_is_left_behind(tmp_path):
    """A child that outlives its parent, in a session of its own, would leave a mark after two seconds."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and len(parent.parts) > 2:
            parent.chmod(0o755)
    mark = tmp_path / "mark"
    live_on = f"os.setsid()\n    time.sleep(2)\n    open({str(mark)!r}, 'w')\n    os._exit(0)"
    fork = f"import os, time\nif os.fork() == 0:\n    {live_on}\n"
    found = run(fork)
    assert found.isolation is not None
    if found.isolation.single:
        assert found.message.startswith("BlockingIOError")
        assert run("import threading\nthreading.Thread(target=print).start()").message.startswith(
            "RuntimeError"
        )
    # what escapes only does so where the result says that nothing contained it
    if found.isolation.single or found.isolation.contained:
        time.sleep(3)
        assert not mark.exists()


def test_the_group_is_killed_where_nothing_contains_it(tmp_path, monkeypatch):
    """A machine that grants no namespace and counts no processes, made by taking these lines away."""
    text = sandbox._LAUNCH.read_text()
    for line, instead in (
        ("root = os.getuid() == 0", "root = False"),
        ("granted = unshare(libc)", "granted = 0"),
        ("(resource.RLIMIT_NPROC, 1),", ""),
    ):
        assert text.count(line) == 1
        text = text.replace(line, instead)
    (tmp_path / "launch.py").write_text(text)
    monkeypatch.setattr(sandbox, "_LAUNCH", tmp_path / "launch.py")
    mark = tmp_path / "mark"
    child = f"time.sleep(1.5)\n    open({str(mark)!r}, 'w')\n    os._exit(0)"
    found = run(f"import os, time\nif os.fork() == 0:\n    {child}\n")
    assert found.passed
    assert "not in force: no network, own process namespace" in found.isolation.describe()
    time.sleep(2.5)
    assert not mark.exists()


@pytest.mark.full
def test_there_is_no_network_where_the_result_says_so():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        found = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)")
    assert found.isolation is not None
    assert found.passed != found.isolation.network
    tool = shutil.which("unshare")
    ways = (["-n", "-p", "--fork"], ["-r", "-n", "-p", "--fork"])
    if tool and any(
        subprocess.run([tool, *way, "true"], capture_output=True).returncode == 0 for way in ways
    ):
        assert found.isolation.network
        assert found.isolation.contained


@pytest.mark.full
def test_it_is_told_as_whom_and_where_a_program_ran():
    found = run("import os\nraise ValueError(os.getpid(), os.getuid())")
    pid, user = map(int, found.message.removeprefix("ValueError: (").rstrip(")").split(","))
    assert found.isolation is not None
    assert found.isolation.contained == (pid == 1)
    assert found.isolation.user.startswith("nobody") == (user == 65534 != os.getuid())
    if found.isolation.user.startswith("nobody"):
        assert run("open('/etc/hosts', 'a')").message.startswith("PermissionError")


@pytest.mark.full
def test_what_held_it_in_is_told():
    line = Isolation(network=True, contained=False, single=True, user="nobody").describe()
    held, missing = line.split("; not in force: ")
    assert "no network" in held
    assert "no further processes" in held
    assert missing == "own process namespace; as user: nobody"
    runs = humaneval.grade_completions([PROBLEM], [["    return 2 * x\n"] * 2], QUICK)
    assert humaneval.describe_isolation(runs) == runs[0][0].isolation.describe()


def test_a_program_that_cannot_start_is_no_failure_of_the_program(monkeypatch):
    monkeypatch.setattr("fedlowrank.language.scores.sandbox.sys.executable", "/bin/false")
    with pytest.raises(TaskError, match="could not be started under limits: code 1"):
        run("x = 1")


@pytest.mark.full
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(numbers):
    n, c, k = numbers
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert len(subsets) == comb(n, k)
    assert humaneval.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.full
def test_several_samples_of_several_problems():
    right, wrong = "    return 2 * x\n", "    return x\n"
    runs = humaneval.grade_completions([PROBLEM, PROBLEM], [[right, wrong, wrong], [wrong] * 3], QUICK)
    assert [[run.passed for run in own] for own in runs] == [[True, False, False], [False] * 3]
    assert humaneval.mean_pass_at_k(runs, 1) == pytest.approx(1 / 6)
    assert humaneval.mean_pass_at_k(runs, 2) == pytest.approx(2 / 3 / 2)


@pytest.mark.data
def test_the_canonical_solutions_pass(real):
    with gzip.open(real / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    assert len(problems) == 164
    # some solutions define helpers or print, which a completion cut at the stop strings could not
    runs = humaneval.grade_completions(
        problems, [[p["canonical_solution"]] for p in problems], ProgramLimits(), ()
    )
    assert [p["task_id"] for p, (run,) in zip(problems, runs, strict=True) if not run.passed] == []
    empty = humaneval.grade_completions(problems, [["    pass\n"] for _ in problems], ProgramLimits())
    assert humaneval.mean_pass_at_k(empty, 1) == 0
