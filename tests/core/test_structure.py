"""The shape of the code: one paper, one file; small methods; small files; nothing but exports in ``__init__``."""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import torch

from fedlowrank.methods import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedlowrank"
FILES = sorted(SOURCE.rglob("*.py"))


# one paper with several methods
FEDOPT = ("fedadagrad", "fedadam", "fedyogi")


def file_of(name: str) -> str:
    """The file of a method: of its own name but for several methods of one paper."""
    return "fedopt" if name in FEDOPT else name


def lines_of_code(text: str) -> int:
    """Lines that hold code: no docstrings, comments, blank lines or imports."""
    tree = ast.parse(text)
    skip: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            skip |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            used |= set(range(token.start[0], token.end[0] + 1))
    return len({n for n in used - skip if n <= len(text.splitlines()) and text.splitlines()[n - 1].strip()})


def test_lines_of_code_counts_neither_docstrings_nor_comments() -> None:
    text = '"""Doc."""\nimport os\n\n# a comment\ndef f():\n    """Doc\n    on."""\n    return (\n        1\n    )\n'
    assert lines_of_code(text) == 4


def test_files_methods_and_documentation_correspond_one_to_one() -> None:
    files = {p.stem for p in (SOURCE / "methods").glob("*.py")} - {"__init__"}
    assert files == {file_of(name) for name in METHODS}
    documented = tomllib.loads((ROOT / "docs" / "method_notes.toml").read_text())
    assert set(METHODS) == set(documented)
    assert {name: cls.__module__ for name, cls in METHODS.items()} == {
        n: f"fedlowrank.methods.{file_of(n)}" for n in METHODS
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_small_and_cites_its_paper_with_the_algorithm_box(name: str) -> None:
    text = (SOURCE / "methods" / f"{file_of(name)}.py").read_text()
    methods = sum(file_of(n) == file_of(name) for n in METHODS)
    # the trees that a method sends and keeps are part of the 80
    assert lines_of_code(text) <= 80 * methods, f"{name}: {lines_of_code(text)} lines"
    box = ast.get_docstring(ast.parse(text)) or ""
    assert "local_update" in box
    assert name == "standalone" or ("arXiv:" in box and "server_update" in box and "download" in box)


def test_no_file_is_longer_than_400_lines() -> None:
    long = {p.relative_to(ROOT): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_init_files_only_export() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            kinds = {type(node) for node in ast.parse(path.read_text()).body}
            if path.parent == SOURCE:
                # public names are imported when they are first used
                kinds -= {ast.FunctionDef, ast.If}
            assert kinds <= {ast.Expr, ast.ImportFrom, ast.Import, ast.Assign, ast.AnnAssign}, path


def test_imports_go_downwards_only() -> None:
    """The layers of pyproject.toml: a method knows no engine, an engine no method, and there are no cycles of
    rooms."""
    command = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_root_holds_no_loose_files() -> None:
    assert {p.name for p in SOURCE.iterdir() if p.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


def test_a_bare_pytest_computes_on_one_thread_as_make_test_does() -> None:
    code = "import torch; print(torch.get_num_threads())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]
    assert torch.get_num_threads() == 1
