"""The structure of code and repository: one paper, one file; only exports in ``__init__``; no large files."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest
import torch

from fedlowrank.core.contract import KeepsSumOfUploads, Method
from fedlowrank.methods import METHODS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedlowrank"
TESTS = ROOT / "tests"
FILES = sorted(SOURCE.rglob("*.py"))


# one paper with several methods
FEDOPT = ("fedadagrad", "fedadam", "fedyogi")


def file_of(name: str) -> str:
    """The file of a method: of its own name but for several methods of one paper."""
    return "fedopt" if name in FEDOPT else name


def test_files_methods_and_documentation_correspond_one_to_one() -> None:
    files = {p.stem for p in (SOURCE / "methods").glob("*.py")} - {"__init__"}
    assert files == {file_of(name) for name in METHODS}
    documented = tomllib.loads((ROOT / "docs" / "method_notes.toml").read_text())
    assert set(METHODS) == set(documented)
    assert {name: cls.__module__ for name, cls in METHODS.items()} == {
        n: f"fedlowrank.methods.{file_of(n)}" for n in METHODS
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_method_cites_its_paper_with_the_algorithm_box(name: str) -> None:
    text = (SOURCE / "methods" / f"{file_of(name)}.py").read_text()
    box = ast.get_docstring(ast.parse(text)) or ""
    assert "local_update" in box
    assert name == "standalone" or ("arXiv:" in box and "server_update" in box and "download" in box)


@pytest.mark.parametrize("name", METHODS)
def test_the_last_column_of_a_box_names_hooks(name: str) -> None:
    """So that a line of the paper is found by the name of the function that holds it."""
    box = ast.get_docstring(ast.parse((SOURCE / "methods" / f"{file_of(name)}.py").read_text())) or ""
    named = re.findall(r"^    .*\S {2,}([a-z_]+)$", box, re.MULTILINE)
    assert named or name == "standalone"
    module = sys.modules[METHODS[name].__module__]
    # or a function of the file that a hook calls; "here" heads the column in some boxes
    assert set(named) - {"here"} <= {
        n for n in (*dir(METHODS[name]), *vars(module)) if not n.startswith("__")
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_public_function_of_a_method_is_a_hook(name: str) -> None:
    """A hook under a name that has changed would never be called."""
    own = [k for k in METHODS[name].__mro__ if k not in Method.__mro__]
    functions = {n for k in own for n, v in vars(k).items() if callable(v) and not isinstance(v, type)}
    optional = {"follow_upload"} & set(vars(KeepsSumOfUploads))
    assert {n for n in functions if not n.startswith("_")} <= set(dir(Method)) | optional


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
    actual = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert actual.returncode == 0, actual.stdout


def find_circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Files that import each other in a circle, the first one twice, or None."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def test_files_do_not_import_each_other_in_circles() -> None:
    """Imports in functions and for type checkers count, too."""
    graph = grimp.build_graph("fedlowrank", cache_dir=None, exclude_type_checking_imports=False)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert (
        "fedlowrank.training.client_tensors.client_tensor"
        in imports["fedlowrank.training.client_tensors.tensor_rules"]
    )
    assert find_circle(imports) is None


def test_a_circle_of_files_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert sorted(set(find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) or ())) == ["b", "c"]


# what a method calls its own state and messages by their role in the contract, each in its file
ROLES = {"ClientState", "Download", "Joint", "ServerState", "Total", "Upload"}


def repeated_names(names_of: dict[str, list[str]]) -> dict[str, list[str]]:
    """Names that several files define, given the names by file; roles may recur among methods."""
    files: dict[str, list[str]] = {}
    for path, names in names_of.items():
        for name in names:
            is_role = name in ROLES and (path.startswith("methods/") or path == "trust/protection.py")
            if not is_role:
                files.setdefault(name, []).append(path)
    return {name: actual for name, actual in files.items() if len(actual) > 1}


def type_aliases(module: ast.Module) -> list[str]:
    """Types that a file gives a name, such as ``Params = dict[str, Tensor]``; variables of types are no names of a type."""
    actual = []
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            actual.append(node.target.id)
        if isinstance(node, ast.Assign) and not (
            isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("TypeVar", "ParamSpec")
        ):
            actual += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return [name for name in actual if name[0].isupper() and not name.isupper()]


def test_no_two_classes_or_types_have_one_name() -> None:
    classes = {
        path.relative_to(SOURCE).as_posix(): [
            node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        ]
        + type_aliases(ast.parse(path.read_text()))
        for path in FILES
    }
    assert "MaskingPlan" in classes["trust/secure_sums.py"]
    assert "Factors" in classes["linalg/pair.py"]
    assert repeated_names(classes) == {}


def test_no_two_functions_have_one_name() -> None:
    """But for those of the command line, named after its commands, and ``main`` of modules that are run."""
    functions = {
        path.relative_to(SOURCE).as_posix(): [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "main"
        ]
        for path in FILES
        if path.name != "__init__.py" and path.relative_to(SOURCE).parts[0] != "cli"
    }
    assert "measure_norms" in functions["network/validation/norms.py"]
    assert repeated_names(functions) == {}


def test_two_classes_of_one_name_are_found() -> None:
    names = {
        "a.py": ["Plan", "ServerState"],
        "b.py": ["Other", "Plan"],
        "methods/c.py": ["ServerState"],
        "methods/d.py": ["ServerState"],
    }
    assert repeated_names(names) == {"Plan": ["a.py", "b.py"]}
    assert repeated_names({**names, "b.py": ["ServerState"]}) == {"ServerState": ["a.py", "b.py"]}


def test_no_two_files_have_one_name_and_a_folder_holds_at_most_twelve() -> None:
    """But for the methods, whose folder is the list of papers."""
    names = [path.name for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    folders: dict[Path, int] = {}
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {folder.name for folder, count in folders.items() if count > 12} == {"methods"}


def imported_modules(path: Path, text: str) -> set[str]:
    """Modules that a file imports or takes names from; relative ones by their full name."""
    actual = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts[: -(node.level - 1) or None] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            # what is imported may be a module of the package, too
            actual |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return actual


def misplaced_imports(texts: dict[Path, str]) -> list[str]:
    """Imports of test modules, and imports of test helpers under a second name, given the texts of test files."""
    full = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in texts}
    actual = []
    for path, text in texts.items():
        folders = [folder for folder in path.parents if folder.is_relative_to(TESTS)]
        for name in sorted(imported_modules(path, text)):
            if name in full and full[name].name.startswith("test_"):
                actual.append(f"{path.relative_to(ROOT)} imports the test module {name}")
            if any(folder.joinpath(*name.split(".")).with_suffix(".py") in texts for folder in folders):
                actual.append(f"{path.relative_to(ROOT)} names a helper {name}, not tests. ...")
    return actual


def test_no_test_module_imports_another_and_every_helper_has_one_name() -> None:
    """A helper with two names is two modules, whose classes differ."""
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    assert TESTS / "support" / "client_tables.py" in texts
    assert misplaced_imports(texts) == []


def test_imports_of_test_modules_and_second_names_are_found() -> None:
    helper, other = TESTS / "support" / "helper.py", TESTS / "data" / "test_other.py"
    files = {helper: "", other: "from tests.support.helper import make\nimport json\n"}
    assert misplaced_imports(files) == []
    for line in (
        "from .test_other import A",
        "from tests.data.test_other import A",
        "from . import test_other",
    ):
        path = TESTS / "data" / "test_one.py"
        assert misplaced_imports({**files, path: line}) == [
            "tests/data/test_one.py imports the test module tests.data.test_other"
        ]
    for line, name in (
        ("from support.helper import A", "support.helper"),
        ("from helper import A", "helper"),
    ):
        path = TESTS / "support" / "maker.py"
        assert misplaced_imports({**files, path: line}) == [
            f"tests/support/maker.py names a helper {name}, not tests. ..."
        ]


def test_every_test_folder_is_a_package() -> None:
    """A file without a package around it would be imported by its bare name."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_root_holds_no_loose_files() -> None:
    assert {p.name for p in SOURCE.iterdir() if p.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.full
def test_a_bare_pytest_computes_on_one_thread_as_make_test_does() -> None:
    code = "import torch; print(torch.get_num_threads())"
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert actual.stdout.split() == ["1"]
    assert torch.get_num_threads() == 1


ROOT_FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
}
ROOT_FOLDERS = {".ci", ".github", "benchmarks", "docs", "examples", "experiments", "src", "tests"}
# tracked files that may exceed the limit, each with the reason
LARGE_FILES: dict[str, str] = {}
LIMIT = 1_000_000  # bytes


def tracked_files() -> list[str]:
    """Paths that git tracks, relative to the root; skips where there is no clone (an unpacked sdist)."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def misplaced_files(sizes: dict[str, int]) -> list[str]:
    """Files that a commit should not hold: unknown names in the root, and files above the limit."""
    roots = ROOT_FILES | ROOT_FOLDERS
    loose = [name for name in sizes if name.split("/")[0] not in roots]
    return loose + [name for name, size in sizes.items() if size > LIMIT and name not in LARGE_FILES]


def test_the_repository_holds_no_large_or_loose_file() -> None:
    assert misplaced_files({name: (ROOT / name).stat().st_size for name in tracked_files()}) == []
    assert set(LARGE_FILES) <= set(tracked_files())


def test_a_wheel_in_the_root_and_a_large_file_are_found() -> None:
    sizes = {"README.md": 10, "numpy-2.4.6.whl": 10, "docs/data.bin": LIMIT + 1, "docs/page.md": LIMIT}
    assert misplaced_files(sizes) == ["numpy-2.4.6.whl", "docs/data.bin"]


@pytest.mark.parametrize(
    "name", ["a.whl", "docs/a.tar.gz", "a.zip", "m.safetensors", "x/m.gguf", "m.pt", "d.npz"]
)
def test_archives_and_model_files_are_ignored(name: str) -> None:
    tracked_files()
    actual = subprocess.run(["git", "check-ignore", "-q", "--no-index", name], cwd=ROOT, check=False)
    assert actual.returncode == 0


def misnamed_arguments(text: str) -> list[str]:
    """``Args:`` entries of docstrings that name no argument, as ``owner.argument``."""
    actual = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE)
        entries = re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE) if section else []
        names = arguments_of(node)
        actual += [f"{node.name}.{entry}" for entry in entries if entry not in names]
    return actual


def arguments_of(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Arguments of a function; of a class, those of its constructor."""
    if isinstance(node, ast.FunctionDef):
        return {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    fields = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
    constructors = [c for c in node.body if isinstance(c, ast.FunctionDef) and c.name == "__init__"]
    return {f.id for f in fields if isinstance(f, ast.Name)}.union(*map(arguments_of, constructors))


def test_docstrings_name_arguments_that_exist() -> None:
    assert {path.name: actual for path in FILES if (actual := misnamed_arguments(path.read_text()))} == {}


def test_a_misnamed_argument_is_found() -> None:
    text = 'def f(a, *b, **c):\n    """F.\n\n    Args:\n        a: one\n        {}: two\n    """\n'
    assert misnamed_arguments(text.format("**c")) == []
    assert misnamed_arguments(text.format("old")) == ["f.old"]
    record = 'class R:\n    """R.\n\n    Args:\n        x: one\n        y: two\n    """\n    x: int\n'
    assert misnamed_arguments(record) == ["R.y"]


VAGUE_NAMES = {
    *(
        "asked",
        "found",
        "given",
        "known",
        "laid",
        "listed",
        "named",
        "present",
        "said",
        "seen",
        "shown",
        "taken",
        "told",
        "used",
    ),
    *("bad", "cure", "everything", "good", "here", "home", "how", "like", "most", "near", "now", "wanted"),
    *("mine", "one", "own", "place", "places", "some", "stuff", "theirs", "thing", "things", "who", "whose"),
}
"""Pronouns, adverbs and participles that do not say what a variable holds."""


def vague_names(text: str) -> set[str]:
    """Variables and arguments of a file that have one of :data:`VAGUE_NAMES`."""
    nodes = list(ast.walk(ast.parse(text)))
    variables = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return (variables | {n.arg for n in nodes if isinstance(n, ast.arg)}) & VAGUE_NAMES


def test_variables_are_named_after_what_they_hold() -> None:
    assert {
        path.relative_to(SOURCE).as_posix(): actual
        for path in FILES
        if (actual := vague_names(path.read_text()))
    } == {}


def test_a_vague_name_is_found() -> None:
    assert vague_names("def f(known, x):\n    return [one for one in x]") == {"known", "one"}
    assert vague_names("def f(clients):\n    return clients.known") == set()


def find_texts_without_encoding(text: str) -> list[int]:
    """Lines of calls that read or write text in the encoding of the system."""
    lines = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        arguments = call.args[1:2] if name == "open" and isinstance(call.func, ast.Name) else call.args[:1]
        mode = arguments[0] if arguments else ast.Constant("r")
        is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value
        is_method = isinstance(call.func, ast.Attribute) and name in ("read_text", "write_text")
        has_encoding = any(keyword.arg == "encoding" for keyword in call.keywords)
        if (is_method or (name == "open" and is_text)) and not has_encoding:
            lines.append(call.lineno)
    return lines


def test_text_files_are_read_and_written_as_utf_8() -> None:
    lines = {path: find_texts_without_encoding(path.read_text()) for path in FILES}
    assert {str(path.relative_to(SOURCE)): numbers for path, numbers in lines.items() if numbers} == {}


def test_a_text_without_its_encoding_is_found() -> None:
    text = (
        "p.read_text()\np.open()\nopen(p, 'w')\np.open('rb')\nopen(p, 'w', encoding='utf-8')\nImage.open(p)\n"
    )
    assert find_texts_without_encoding(text) == [1, 2, 3]
