"""The class of a method is compared with the contract before anything runs."""

from __future__ import annotations

import functools
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest

from fedlowrank import Method, simulate
from fedlowrank.cli.main import main
from fedlowrank.core.contract.hook_signatures import check_class
from fedlowrank.core.errors import ConfigError
from fedlowrank.methods import METHODS, FedAvg
from fedlowrank.rounds.setup.averaged_statistics import AveragedStatistics
from fedlowrank.trust.protection import Protected

HEAD = """
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar
from fedlowrank import SGD, ClientModel, Method, Pass, supervised_loss
from fedlowrank.methods import FedAvg
"""
GOOD = """
@dataclass(frozen=True)
class My(Method):
    alpha: float = 0.5
    title = "Mine"
    def server_init(self, task):
        return task.common_model(self.title).initial
    def local_update(self, state, down, view):
        return state, view.train(supervised_loss(view.model), down, "local", self.optimizer)
    def server_update(self, server, total, view):
        return total
"""


def made(code: str) -> type[Any]:
    """The class My of a module."""
    module: Any = types.ModuleType("fedlowrank_test_mine")
    # where the dataclass module looks for the meaning of an annotation that is text
    sys.modules["fedlowrank_test_mine"] = module
    exec(compile(HEAD + code, "mine.py", "exec", dont_inherit=True), vars(module))
    cls: type[Any] = module.My
    return cls


def with_body(text: str, base: str = GOOD) -> str:
    """The good class with more in its body."""
    return base + textwrap.indent(textwrap.dedent(text), "    ")


def without(name: str) -> str:
    """The good class without a function."""
    start = GOOD.index(f"    def {name}(")
    end = GOOD.find("    def ", start + 1)
    return GOOD[:start] + (GOOD[end:] if end > 0 else "")


LOCAL = "def {}(self, state, down, view): return state, down"

MISTAKES = {
    "a needed hook is misspelt": (
        with_body(LOCAL.format("local_updates"), without("local_update")),
        ["local_updates (line ", "Did you mean 'local_update'? Write def local_update(self, state, down, view)"],
    ),
    "two letters are exchanged": (
        with_body("def server_udpate(self, server, total, view): return total", without("server_update")),
        ["Did you mean 'server_update'? Write def server_update(self, server, total, view)"],
    ),
    "a needed hook has another package's name": (
        with_body(LOCAL.format("client_update"), without("local_update")),
        ["local_update is missing. Write def local_update(self, state, down, view); if client_update is meant"],
    ),
    "a needed hook is missing": (
        without("server_init"),
        ["server_init is missing. Write def server_init(self, task)"],
    ),
    "a hook with a default is misspelt": (
        with_body("def client_modle(self, state, down, view): return down"),
        ["Did you mean 'client_model'? Write def client_model(self, state, down, view)"],
    ),
    "the words of a name are exchanged": (
        with_body("def init_client(self, client, task): return None"),
        ["Did you mean 'client_init'?"],
    ),
    "a hook that few methods have is misspelt": (
        with_body("def follow_uploads(self, before, after, down, upload, view): return after"),
        ["Did you mean 'follow_upload'? Write def follow_upload(self, before, after, down, upload, view)"],
    ),
    "a hook that few methods have takes too few arguments": (
        with_body("def follow_upload(self, before, after, upload, view): return after"),
        ["follow_upload (line 18) takes (self, before, after, upload, view) and is called with (self, before, after, down"],
    ),
    "camel case": (with_body("def clientInit(self, client, task): return None"), ["Did you mean 'client_init'?"]),
    "a misspelt override of another method's hook": (
        "class My(FedAvg):\n    def local_updates(self, state, down, view): return state, down\n",
        ["Did you mean 'local_update'?"],
    ),
    "too few arguments": (
        with_body("def contribution(self, upload, client): return upload"),
        ["contribution (line 18) takes (self, upload, client) and is called with (self, server, upload, client)"],
    ),
    "too many arguments": (
        with_body("def download(self, server, client, round): return server"),
        ["download (line 18) takes (self, server, client, round) and is called with (self, server, client)"],
    ),
    "no self": (
        with_body("def server_metrics(server): return {}"),
        ["server_metrics (line 18) takes (server) and is called with (self, server)"],
    ),
    "a keyword argument without a default": (
        with_body("def download(self, server, client, *, scale): return server"),
        ["takes (self, server, client, *, scale) and is called with (self, server, client)"],
    ),
    "another order": (
        with_body("def client_model(self, down, state, view): return ClientModel(down)"),
        ["takes (self, down, state, view) and is called with (self, state, down, view)"],
    ),
    "behind a decorator": (
        with_body("@functools.lru_cache\ndef client_init(self, task): return None"),
        ["takes (self, task) and is called with (self, client, task)"],
    ),
    "a staticmethod": (
        with_body("@staticmethod\ndef client_init(client, task): return None"),
        ["client_init (line ", "is a staticmethod. Write def client_init(self, client, task) without @staticmethod"],
    ),
    "a classmethod": (
        with_body("@classmethod\ndef client_init(cls, client, task): return None"),
        ["is a classmethod. Write def client_init(self, client, task) without @classmethod"],
    ),
    "a property": (
        with_body("@property\ndef passes(self): return {'local': Pass()}"),
        ["passes (line 18) is a property. Write def passes(self) without @property"],
    ),
    "a cached property": (
        with_body("@functools.cached_property\ndef passes(self): return {'local': Pass()}"),
        ["is a cached_property. Write def passes(self) without @cached_property"],
    ),
    "a value": (
        with_body("passes = {'local': Pass()}"),
        ["passes is of type dict and must be a function. Write def passes(self)"],
    ),
    "an async function": (
        with_body("async def client_init(self, client, task): return None"),
        ["client_init (line 18) is async and must return its result"],
    ),
    "a generator": (
        with_body("def passes(self):\n    yield 'local', Pass()"),
        ["passes (line 18) yields and must return its result"],
    ),
    "a function for a field": (
        with_body("def optimizer(self): return SGD(lr=0.1)"),
        ["optimizer (line 18) is a function and must be a field. Write optimizer: Optimizer = ..."],
    ),
    "a property for a field": (
        with_body("@property\ndef epochs(self): return 3"),
        ["epochs (line 18) is a property and must be a field. Write epochs: int = ..."],
    ),
    "a field for a hook": (with_body("server_metrics: int = 3"), ["server_metrics is of type int and must be a function"]),
    "a function for a class variable": (
        with_body("def title(self): return 'Mine'"),
        ['title is of type function and must be of type str. Write title = "..." in the class'],
    ),
    "a text for a flag": (
        with_body("heterogeneous = 'yes'"),
        ["heterogeneous is of type str and must be of type bool. Write heterogeneous = True in the class"],
    ),
    "a misspelt class variable": (with_body("heterogenous = True"), ["Did you mean 'heterogeneous'?"]),
    "a misspelt class variable with a type": (
        with_body("heterogenous: ClassVar[bool] = True"),
        ["Did you mean 'heterogeneous'?"],
    ),
    "no dataclass": (
        GOOD.replace("@dataclass(frozen=True)", ""),
        ["alpha is no setting: write @dataclass(frozen=True) above class My"],
    ),
    "no dataclass above a subclass": (
        "class My(FedAvg):\n    alpha: float = 0.5\n    epochs: int = 5\n",
        ["alpha, epochs are no settings: write @dataclass(frozen=True) above class My"],
    ),
    "no annotation": (
        GOOD.replace("alpha: float", "alpha"),
        ["alpha = 0.5 has no annotation, so it is no setting. Write alpha: float = 0.5", "alpha: ClassVar[float]"],
    ),
    "another default without an annotation": (
        with_body("epochs = 5"),
        ["epochs = 5 has no annotation, so it is no setting. Write epochs: int = 5"],
    ),
    "settings without an annotation": (with_body("head = SGD(lr=0.1)"), ["Write head: SGD = SGD(lr=0.1,"]),
    "a misspelt class variable whose type is text": (
        with_body("heterogenous: 'ClassVar[bool]' = True"),
        ["Did you mean 'heterogeneous'?"],
    ),
    "no title": (GOOD.replace('    title = "Mine"\n', ""), ['title is missing. Write title = "..." in the class']),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_an_object_is_made(mistake: str) -> None:
    code, says = MISTAKES[mistake]
    cls = made(code)
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            cls()
        for words in says:
            assert words in str(error.value)
    # a mistake is named once
    assert str(error.value).count("\n") <= 1


ALLOWED = {
    "the good class": GOOD,
    "helpers": with_body("""
        @staticmethod
        def local_step(p, g): return p - g
        @classmethod
        def of(cls, alpha): return cls(alpha=alpha)
        @property
        def beta(self): return 1 - self.alpha
        def server_step(self, server, total): return total
        def update_scale(self): return 1.0
        def encode(self, upload): return upload
        def _local_updates(self, x): return x
        @functools.cached_property
        def table(self): return {}
        """),
    "a helper that is nearly the name of a hook that is there": with_body("def local_updates(self): return []"),
    "constants": with_body(
        'EPS = 1e-8\n_names = ("a", "b")\nlabel: ClassVar[str] = "x"\nother: "ClassVar[str]" = "x"\nclass Inner: pass\nloss = len'
    ),
    "other names of arguments": with_body("def client_model(self, own, sent, v, extra=None): return ClientModel(sent)"),
    "any arguments": with_body("def client_model(self, *args, **more): return ClientModel(args[1])"),
    "a hook made by a function": with_body("passes = lambda self: {'local': Pass()}"),
    "a hook that is an object": "class Made:\n    def __call__(self): return {'local': Pass()}\n"
    + with_body("passes = Made()"),
    "a hook that is a partial method": with_body(
        "def named(self, name): return {name: Pass()}\npasses = functools.partialmethod(named, 'local')"
    ),
    "fields": with_body("bound: float = 1.0\nmetric: str = 'l2'\nrates: tuple[float, ...] = field(default=(1.0,))"),
    "a subclass without fields": GOOD + "\nBase = My\nclass My(Base):\n    title = 'More'\n",
    "no annotation of a title, a flag, bounds": with_body("title: str = 'Mine'\none_model = True\nbounds = {'alpha': '> 0'}"),
    "another value of an inherited constant": with_body('label: ClassVar[str] = "x"')
    + "\nBase = My\nclass My(Base):\n    label = 'y'\n",
    "a constructor of its own": "class My(FedAvg):\n    beta: float\n    gamma = 2\n    def __init__(self, beta=1.0):\n"
    "        super().__init__()\n        object.__setattr__(self, 'beta', beta)\n",
}  # fmt: skip


@pytest.mark.parametrize("code", ALLOWED.values(), ids=list(ALLOWED))
def test_what_is_no_mistake(code: str) -> None:
    assert made(code)().passes()


def test_the_packages_own_methods_and_wrappers_fit_in_little_time() -> None:
    classes = [*METHODS.values(), Protected, AveragedStatistics]
    for cls in classes:
        check_class(cls, Method)
    start = time.process_time()
    for cls in classes:
        check_class(cls, Method)
    assert (time.process_time() - start) / len(classes) < 1e-3
    # once for each class
    seen: list[type[Any]] = []

    class Counted(FedAvg):
        check_class = classmethod(functools.partial(lambda seen, cls: seen.append(cls), seen))

    Counted()
    Counted()
    assert seen == [Counted]


def test_all_mistakes_are_listed_where_the_class_is(tmp_path: Path) -> None:
    code = with_body("def downloads(self, server, client): return server", without("server_init"))
    with pytest.raises(ConfigError) as error:
        simulate(made(code)(), None)  # type: ignore[arg-type]
    first, *lines = str(error.value).splitlines()
    assert first == "the class fedlowrank_test_mine:My has 2 mistakes:"
    assert [line.split()[0] for line in lines] == ["server_init", "downloads"]


@pytest.mark.parametrize(
    "command",
    [
        ["check", "mine_wrong:My"],
        ["compare", "mine.toml"],
        ["run", "mine.toml", "--method", "mine_wrong:My"],
        ["data", "mine.toml", "method='mine_wrong:My'"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_gives_the_same_answer(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mine_wrong.py").write_text(HEAD + MISTAKES["two letters are exchanged"][0])
    Path("mine.toml").write_text('[data]\nsource = "digits"\n[run]\nrounds = 1\n')
    if command[0] == "compare":
        Path("mine.toml").write_text(
            'compare = ["fedavg", "mine_wrong:My"]\n' + Path("mine.toml").read_text()
        )
    assert main(command) == 1
    assert capsys.readouterr().err == (
        "error: the class mine_wrong:My has a mistake:\n  server_udpate (line 16): a method has no 'server_udpate'. "
        "Did you mean 'server_update'? Write def server_update(self, server, total, view)\n"
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (GOOD.replace("(frozen=True)", ""), "class My). Write @dataclass(frozen=True) above this class"),
        (
            GOOD + "\n\n@dataclass\nclass Further(My):\n    beta: float = 0.5\n",
            ".py, line {line}, class Further). Write @dataclass(frozen=True) above this class",
        ),
        (
            GOOD.replace("alpha: float = 0.5", "alpha: float"),
            "Give the field a default, such as alpha: float = 0.5",
        ),
        (
            GOOD.replace("alpha: float = 0.5", "alpha = field(default=0.5)"),
            "Write its type, such as alpha: float",
        ),
        (
            GOOD.replace("(frozen=True)", "(frozen=True, kw_only=True)").replace("float = 0.5", "float"),
            "alpha has no default",
        ),
    ],
    ids=["not frozen", "another class is not frozen", "no default", "no type", "needed"],
)
def test_what_the_dataclass_module_refuses(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"mine_{tmp_path.name}"
    Path(f"{name}.py").write_text(HEAD + code)
    assert main(["check", f"{name}:My"]) == 1
    last_decorator = (HEAD + code).splitlines()[::-1].index("@dataclass") if "{line}" in says else 0
    assert says.format(line=len((HEAD + code).splitlines()) - last_decorator) in capsys.readouterr().err
