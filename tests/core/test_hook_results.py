"""What a method's hooks and functions return and take is checked where it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import (
    ClientModel,
    Clipping,
    Federation,
    Mean,
    Method,
    Pass,
    simulate,
    supervised_loss,
)
from fedlowrank.core.contract.hook_results import NonFiniteResultError, check_pair, check_server_state
from fedlowrank.core.errors import FedlowrankError, NonFiniteError, TaskError

X = torch.linspace(-1, 1, 60).reshape(12, 5)
FEDERATION = Federation.from_arrays([(X, torch.arange(12) % 2)] * 2, torch.nn.Linear(5, 2), val=0)


class Plain(Method[Any, Any, Any, Any]):
    title = "Plain"

    def server_init(self, task):
        return task.common_model(self.title).initial

    def local_update(self, state, down, view):
        return None, self.trained(down, view)

    def trained(self, down, view, **more):
        return view.train(supervised_loss(view.model), down, "local", self.optimizer, **more)

    def server_update(self, server, total, view):
        return total


def loss(params, batch):
    return (params["weight"].sum() * batch.x).mean()


WRONG: dict[str, tuple[str, Any, str]] = {
    "no pair": ("local_update", lambda s, c, d, v: s.trained(d, v),
                "local_update must return the pair (state, upload); it returned a dict of a Tensor"),
    "nothing": ("local_update", lambda s, c, d, v: None, "(state, upload); it returned None"),
    "three": ("local_update", lambda s, c, d, v: (c, d, d), "it returned a tuple of 3"),
    "parameters": ("client_model", lambda s, c, d, v: d, "client_model must return a ClientModel; it returned a dict"),
    "no model": ("client_model", lambda s, c, d, v: None, "must return a ClientModel; it returned None"),
    "no parameters": ("client_model", lambda s, c, d, v: ClientModel(None), "params must be a dict of parameters by name or"),  # type: ignore[arg-type]
    "no series": ("client_model", lambda s, c, d, v: ClientModel(d, {"a": 3}), "a must be a dict"),  # type: ignore[dict-item]
    "no first state": ("server_init", lambda s, t: None, "see what server_init and server_update return"),
    "no next state": ("server_update", lambda s, a, t, v: None, "server_update returned None"),
    "list of passes": ("passes", lambda s: [Pass()], 'it returned a list. Write return {"local": self.main_pass}'),
    "numbers for passes": ("passes", lambda s: {"local": 3}, "it returned a dict of a int"),
    "no passes": ("passes", lambda s: {}, "passes must return a dict of passes by name"),
    "bare contribution": ("contribution", lambda s, v, u, c: u, "Wrap it, such as Mean(upload, client.example_count)"),
    "a class in a contribution": ("contribution", lambda s, v, u, c: {"w": Mean}, "at /w it holds a type. Wrap it"),
    "loss of one": ("local_update", lambda s, c, d, v: (c, v.train(lambda p: 0, d, "local", s.optimizer)),
                    "takes (p) and is called with (params, batch)"),
    "loss of three": ("local_update", lambda s, c, d, v: (c, v.train(lambda p, b, w: 0, d, "local", s.optimizer)),
                      "takes (p, b, w) and is called with (params, batch)"),
    "loss without constants": (
        "local_update", lambda s, c, d, v: (c, v.train(loss, d, "local", s.optimizer, constants=(d,))),
        "takes (params, batch) and is called with (params, batch, constants[0])",
    ),
    "prox of one": ("local_update", lambda s, c, d, v: (c, s.trained(d, v, prox=lambda p: p)),
                    "prox at line "),
    "precondition of one": ("local_update", lambda s, c, d, v: (c, s.trained(d, v, precondition=lambda g: g)),
                            "takes (g) and is called with (grads, params)"),
    "statistic of one": ("local_update", lambda s, c, d, v: (v.sum_over_data(lambda p: p, d), d),
                         "takes (p) and is called with (params, batch)"),
    "a dict of constants": ("local_update", lambda s, c, d, v: (c, s.trained(d, v, constants=d)),
                            "constants must be a tuple of trees, such as (down,); it is a dict"),
    "an array for the server": ("server_init", lambda s, t: {"c": np.zeros(2)},
                                "My.server_init: a ndarray at /c cannot be part of a tree; convert it by torch.from_numpy(...)"),
    "an array for a client": ("client_init", lambda s, c, t: {"c": np.zeros(2)}, "My.client_init: a ndarray at /c "),
    "an array in the next state": ("local_update", lambda s, c, d, v: ([np.zeros(2)], d),
                                   "My.local_update (state): a ndarray at /0 "),
    "a NumPy number in an upload": ("local_update", lambda s, c, d, v: (c, {"n": np.float32(1), **d}),
                                    "My.local_update (upload): a float32 at /n cannot be part of a tree; convert it by .item()"),
    "an array in a download": ("download", lambda s, a, c: {"c": np.zeros(2), **a}, "My.download: a ndarray at /c "),
    "an array in the total": ("server_update", lambda s, a, t, v: {"c": np.zeros(2), **t}, "My.server_update: a ndarray at /c "),
    "an array in a mean": ("contribution", lambda s, a, u, c: {"w": Mean(np.zeros(2), 1.0)}, "a ndarray at /w cannot be"),
    "no participants": ("participants", lambda s, m, a: None,
                        "My.participants must return a list of client identifiers; it returned None"),
    "names of participants": ("participants", lambda s, m, a: ["0"], "a list of client identifiers, which are whole numbers"),
    "a share of a participant": ("participants", lambda s, m, a: [0.5], "'float' object cannot be interpreted as an integer"),
    "a participant twice": ("participants", lambda s, m, a: [1, 0, 1], "My.participants returned the client 1 more than once"),
    "the last participant": ("participants", lambda s, m, a: [-1], "participants returned the client -1, which is not available"),
    "no such participant": ("participants", lambda s, m, a: [0, 99], "returned the client 99, which is not available"),
    "a part of a model": (
        "client_model", lambda s, c, d, v: ClientModel({"weight": d["weight"]}),
        "My.client_model: params lacks 'bias' of model 'model', and would be evaluated with initial values there. If the "
        "client's state holds what is missing, write ClientModel({**down, **state})",
    ),
    "a part of a model in a series": (
        "client_model", lambda s, c, d, v: ClientModel(d, {"own": d, "part": {"bias": d["bias"]}}),
        "My.client_model: series 'part' lacks 'weight'",
    ),
    "a function that computes a part": (
        "client_model", lambda s, c, d, v: ClientModel(lambda: {"bias": d["bias"]}), "My.client_model: params lacks 'weight'"
    ),
    "a misspelt parameter": (
        "client_model", lambda s, c, d, v: ClientModel({"weight": d["weight"], "bais": d["bias"]}),
        "params lacks 'bias' of model 'model' (and has 'bais', which the model has not)",
    ),
    "a further parameter": (
        "client_model", lambda s, c, d, v: ClientModel({**d, "x": d["bias"]}),
        "params has 'x', which model 'model' has not. Its parameters are 'weight', 'bias'",
    ),
    "a parameter of one number": (
        "client_model", lambda s, c, d, v: ClientModel({**d, "bias": d["bias"][:1]}),
        "params has 'bias' with shape [1], and in model 'model' it has shape [2]",
    ),
    "a model in a download": (
        "client_model", lambda s, c, d, v: ClientModel({"w": d, "c": d}),
        "params must be a dict of parameters by name; at 'w' it holds a dict of a Tensor. Write ClientModel(down['w'])",
    ),
    "a number for a parameter": (
        "client_model", lambda s, c, d, v: ClientModel({**d, "bias": 0.0}),
        "at 'bias' it holds a float. The parameters of model 'model' are 'weight', 'bias'",
    ),
    "a function without parameters": (
        "client_model", lambda s, c, d, v: ClientModel(lambda: None), "params must be a dict of parameters by name; it is None"
    ),
    "a part of the server's state": (
        "server_update", lambda s, a, t, v: {"weight": t["weight"]},
        "My.client_model: params lacks 'bias' of model 'model', and would be evaluated with initial values there. If the "
        "client's state holds what is missing, write ClientModel({**down, **state}); if the initial values are meant, write "
        "ClientModel({**view.model.initial, **down}). Without a client_model of its own a client uses what download returns, "
        "by default the server's state. See what server_init and server_update return",
    ),
    "a part of the server's model": (
        "server_model", lambda s, a, c, v: {"weight": a["weight"]},
        "My.server_model: its result lacks 'bias' of model 'model', and would be evaluated with initial values there. If the "
        "client's state holds what is missing, write return {**server, **state}; if the initial values are meant, write return "
        "{**view.model.initial, **server}. See",
    ),
    "a model in the server's model": ("server_model", lambda s, a, c, v: {"w": a}, "Write return server['w']"),
    "scores in NumPy": (
        "client_model", lambda s, c, d, v: ClientModel(d, {"own": lambda x: v.model.apply(d, x).numpy()}),
        "My.client_model: series 'own': its function returned a ndarray. It must return a tensor of scores, [b, classes]",
    ),
    "classes for scores": (
        "client_model", lambda s, c, d, v: ClientModel(d, {"own": lambda x: v.model.apply(d, x).argmax(1)}),
        "My.client_model: series 'own': its function makes [1] of one example, but there are 2 classes; it must make [1, 2]",
    ),
    "too few scores": (
        "client_model", lambda s, c, d, v: ClientModel(d, {"own": lambda x: v.model.apply(d, x)[:, :1]}),
        "its function makes [1, 1] of one example, but there are 2 classes",
    ),
    "scores of a part of the examples": (
        "client_model", lambda s, c, d, v: ClientModel(d, {"own": lambda x: v.model.apply(d, x)[:-1]}),
        "It must return one row of scores for each example",
    ),
    "whole numbers to train": (
        "local_update", lambda s, c, d, v: (c, s.trained({**d, "n": torch.tensor(3)}, v)),
        "view.train: at /n of what is trained stands a tensor of torch.int64, which has no gradient",
    ),
    "an optimizer of PyTorch": (
        "local_update",
        lambda s, c, d, v: (c, v.train(loss, d, "local", torch.optim.SGD.__new__(torch.optim.SGD))),
        "view.train: the optimizer must be one of fedlowrank; it is a SGD of torch.optim.sgd. Write self.optimizer",
    ),
    "a prox of another shape": (
        "local_update", lambda s, c, d, v: (c, s.trained(d, v, prox=lambda p, lr: {**p, "bias": p["bias"].sum()})),
        "prox, in pass 'local': at /bias it returned a tensor [] for the parameter [2]",
    ),
    "a precondition of another shape": (
        "local_update",
        lambda s, c, d, v: (c, s.trained(d, v, precondition=lambda g, p: {**g, "weight": g["weight"][:1]})),
        "precondition, in pass 'local': at /weight it returned a tensor [1, 5] for the parameter [2, 5]",
    ),
    "several weights of a mean": (
        "contribution", lambda s, v, u, c: Mean(u, torch.ones(2)),
        "the weight of a Mean is a number, at least 0; this one is tensor",
    ),
    "uploads in half precision": (
        "contribution", lambda s, a, u, c: Mean({n: t.half() for n, t in u.items()}, 1.0),
        "My.server_update returned torch.float16 at /weight of the server's state, which had torch.float32 there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_value_is_named_with_what_to_write(mistake: str) -> None:
    hook, function, says = WRONG[mistake]
    cls = type("My", (Plain,), {hook: function})
    with pytest.raises(FedlowrankError) as error:
        simulate(cls(), FEDERATION, rounds=1)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"engine": "vectorized"}, {"clipping": Clipping(norm=1.0)}], ids=["vectorized", "protected"]
)
def test_engines_and_wrappers_give_the_same_answer(settings: dict[str, Any]) -> None:
    hook, function, _ = WRONG["no pair"]
    with pytest.raises(FedlowrankError, match=r"must return the pair \(state, upload\)"):
        simulate(type("My", (Plain,), {hook: function})(), FEDERATION, rounds=1, **settings)


@pytest.mark.parametrize(
    "more",
    [
        {"prox": lambda p, lr, *rest: p, "constants": (X,)},
        {"prox": lambda p, lr, own=None: p, "constants": (X,)},
        {"prox": lambda p, lr, own=None: p},
        {"precondition": lambda g, p, *, scale=1: g},
    ],
)
def test_functions_that_can_be_called_are_called(more: dict[str, Any]) -> None:
    function = lambda s, c, d, v: (None, s.trained(d, v, **more))  # noqa: E731
    simulate(type("My", (Plain,), {"local_update": function})(), FEDERATION, rounds=1)


def test_the_weighted_mean_of_a_state_that_is_none_stays_allowed() -> None:
    hooks = {
        "server_init": lambda s, t: None,
        "client_init": lambda s, c, t: t.model(c).initial,
        "local_update": lambda s, c, d, v: (s.trained(c, v), {}),
        "contribution": lambda s, u, c, v: Mean({}, 1.0),
        "server_update": lambda s, a, t, v: None,
        "client_model": lambda s, c, d, v: ClientModel(c),
    }
    simulate(type("Alone", (Plain,), hooks)(), FEDERATION, rounds=1)


@pytest.mark.parametrize("settings", [{}, {"engine": "vectorized"}, {"clipping": Clipping(norm=1.0)}])
def test_a_state_may_grow_and_its_types_may_widen(settings: dict[str, Any]) -> None:
    hooks = {
        "server_init": lambda s, t: {"w": t.common_model("My").initial, "count": torch.tensor(0), "norm": torch.zeros(()),
                                     "past": []},
        "download": lambda s, a, c: a["w"],
        # the newest is the first, in single and double precision by turns
        "server_update": lambda s, a, t, v: {
            "w": t, "count": a["count"] + 0.5, "norm": a["norm"].double() + 1,
            "past": [t["bias"].to((torch.float64, torch.float32)[v.round % 2]), *a["past"]],
        },
    }  # fmt: skip
    simulate(type("My", (Plain,), hooks)(), FEDERATION, rounds=3, **settings)


def test_a_nan_in_the_server_s_state_is_named_with_hook_and_round() -> None:
    inf, nan = torch.tensor(torch.inf), torch.tensor(torch.nan)
    before = {"x": torch.ones(2), "bound": inf, "best": float("nan")}
    # an infinity may be a bound that was not reached yet, and Python numbers may be anything
    after = {**before, "x": torch.tensor([1.0, torch.inf])}
    assert check_server_state(Plain(), before, after, 2) is after
    said = r"round 3: the server's state that Plain.server_update returned holds a NaN or an infinity at /x\. Look"
    with pytest.raises(NonFiniteError, match=said):
        check_server_state(Plain(), before, {**before, "x": torch.tensor([1.0, torch.nan])}, 2)
    with pytest.raises(NonFiniteError, match=r"^the server's state .* at /new"):
        check_server_state(Plain(), before, {**before, "new": nan})
    # where it means something, also at another place
    begun = [nan]
    assert check_server_state(Plain(), begun, [inf, nan]) is not None


def test_an_error_of_a_result_can_be_made_again_in_another_process() -> None:
    for error in (
        NonFiniteResultError("the server's state", None, "/x", "Look."),
        NonFiniteResultError("what contribution returned", 2, "", "Look.", 3, "client 3"),
    ):
        make, arguments = error.__reduce__()
        copied = make(*arguments)
        assert (str(copied), copied.finding, copied.client_id) == (str(error), error.finding, error.client_id)


@pytest.mark.parametrize("on_nan", ["stop", "drop"])
def test_a_nan_of_the_server_is_not_blamed_on_a_client_of_the_next_round(on_nan: str) -> None:
    hooks = {
        "server_init": lambda s, t: {"w": t.common_model("My").initial, "side": torch.zeros(1)},
        "download": lambda s, a, c: a["w"],
        "server_update": lambda s, a, t, v: {"w": t, "side": a["side"] / (1 - v.round)},
    }
    with pytest.raises(
        NonFiniteError, match=r"My.server_update returned holds a NaN or an infinity at /side"
    ):
        simulate(type("My", (Plain,), hooks)(), FEDERATION, rounds=3, on_nan=on_nan)


def test_a_wider_type_is_warned_of_where_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    before = {"w": torch.zeros(2), "n": torch.tensor(1)}
    check_server_state(Plain(), before, {"w": torch.zeros(2), "n": torch.tensor(1.0)})
    assert not caplog.records
    check_server_state(Plain(), before, {**before, "w": torch.zeros(2).double()})
    (record,) = caplog.records
    assert (
        "Plain.server_update returned torch.float64 at /w of the server's state, which had torch.float32"
        in record.message
    )
    assert "by .to(torch.float32)" in record.message


def test_a_client_state_that_is_lost_is_refused() -> None:
    assert check_pair(Plain(), (None, {})) == (None, {})
    assert check_pair(Plain(), (None, {}), {"n": 3}) == (None, {})
    with pytest.raises(
        TaskError,
        match=r"local_update returned None for the client's next state, which was a dict of a Tensor",
    ):
        check_pair(Plain(), (None, {}), {"c": torch.zeros(1)})


SWAPPED = {
    "download": {"local_update": lambda s, c, d, v: (s.trained(d, v), None)},
    "contribution": {
        "local_update": lambda s, c, d, v: (s.trained(d, v), None),
        "contribution": lambda s, a, u, c: Mean(u, 1.0),
        "client_model": lambda s, c, d, v: ClientModel(d),
    },
}


@pytest.mark.parametrize("kind", SWAPPED)
def test_a_round_without_uploads_is_warned_of_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    simulate(type("My", (Plain,), SWAPPED[kind])(), FEDERATION, rounds=3)
    assert [r.message for r in caplog.records if "no client has sent an upload" in r.message] == [
        "until round 2 no client has sent an upload, so the state of the server stays as it is. local_update must return "
        "(state, upload), in this order"
    ]


def test_clients_that_train_alone_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    simulate("standalone", FEDERATION, rounds=2)
    simulate(Plain(), FEDERATION, rounds=2)
    every_second = {"local_update": lambda s, c, d, v: (None, s.trained(d, v) if v.round % 2 else None)}
    simulate(type("My", (Plain,), every_second)(), FEDERATION, rounds=3)
    assert not [r for r in caplog.records if "no client has sent an upload" in r.message]
