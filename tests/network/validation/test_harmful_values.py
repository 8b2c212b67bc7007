"""Uploads of the right form whose numbers are nonsense: the reply to blame is found, and the rest is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, Each, ServerView
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.core.key import Key
from fedlowrank.network.validation.uploads import RefusedReplyError, Templates, inspect_upload
from tests.network.validation.attacked_rounds import CASES, LIMITS, aggregate, finite, situation
from tests.support.method_calls import Reply, server_update

# -- the second net


def lies(name: str) -> Iterator[Any]:
    """Uploads of the right form whose numbers are nonsense."""
    upload = situation(name).upload
    for huge in (3e38, -3e38, 1e30, 0.0, -1.0):
        yield tree.map_leaves(lambda t, n=huge: torch.full_like(t, n) if t.is_floating_point() else t, upload)
    for whole in (10**9, -1, -(10**9), 0, 2**62, -(2**63)):
        yield tree.map_leaves(
            lambda t, n=whole: (
                torch.full_like(t, max(min(n, torch.iinfo(t.dtype).max), torch.iinfo(t.dtype).min))
                if not t.is_floating_point() and t.dtype != torch.bool
                else t
            ),
            upload,
        )
    for bit in (True, False):
        yield tree.map_leaves(lambda t, b=bit: torch.full_like(t, b) if t.dtype == torch.bool else t, upload)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_lies_of_the_right_form_never_make_a_state_that_is_not_finite(name: str) -> None:
    s = situation(name)
    for upload in lies(name):
        passed = inspect_upload(tree.encode(upload), s.template, s.me, LIMITS)
        server, dropped = s.sent(passed)
        assert finite(server)
        assert set(dropped) <= {s.me.id}
        if dropped:
            # as if that client had not replied
            rest = [r for r in s.replies if r.client != s.me]
            expected = server_update(s.run.method, s.run.state.server, rest, s.view)
            assert tree.equal(server, expected)


@pytest.mark.parametrize(("name", "field"), [("fd", "labels"), ("fedproto", "labels")])
def test_a_class_that_does_not_exist_names_its_client(name: str, field: str) -> None:
    s = situation(name)
    for wrong in (10**9, -1, 4, -(10**9)):
        labels = s.upload.labels.clone()
        labels[0] = wrong
        _, dropped = s.sent(replace(s.upload, labels=labels))
        assert list(dropped) == [s.me.id]
        assert f"client {s.me.id} sent class {wrong} of 4" in dropped[s.me.id]


def test_negative_counts_take_part_in_no_mean() -> None:
    s = situation("fedproto")
    for count in (-1, 0, -(2**62)):
        server, _ = s.sent(replace(s.upload, count=torch.full_like(s.upload.count, count)))
        assert finite(server)


def test_a_count_counts_for_no_more_than_the_client_s_examples() -> None:
    s = situation("fedproto")
    most = s.me.example_count
    server, _ = s.sent(replace(s.upload, count=torch.full_like(s.upload.count, 2**40)))
    total, weight = torch.zeros_like(server.mean), torch.zeros(len(server.mean))
    for reply in s.replies:
        up = reply.upload
        for label, mean, count in zip(up.labels.tolist(), up.mean, up.count.tolist(), strict=True):
            w = most if reply.client == s.me else count
            total[label] += w * mean
            weight[label] += w
    seen = weight > 0
    assert torch.allclose(server.mean[seen], total[seen] / weight[seen, None], atol=1e-5)


def test_a_mask_of_another_density_harms_only_its_own_client() -> None:
    s = situation("fedspa")
    method, task = s.run.method, s.run.task
    for bit in (True, False):
        masks = {n: torch.full_like(m, bit) for n, m in s.upload.masks.items()}
        server, dropped = s.sent(replace(s.upload, masks=masks))
        assert not dropped
        templates, refused = Templates(method, task), []
        for info in s.run.federation.infos:
            try:
                templates.of(info, method.download(server, info))
            except RefusedReplyError as error:
                refused.append(error)
        assert {error.client for error in refused} <= {s.me.id}
        assert all("FedSpa cannot work with what it would be sent" in str(error) for error in refused)
        assert bit or refused


@dataclass(frozen=True)
class Stub:
    """A method whose server half is one function of the uploads."""

    update: Callable[[Any, Any], Any]
    title: str = "Stub"

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Each[Any]:
        if upload == "refused at once":
            raise ValueError("no")
        return Each(upload)

    def server_update(self, server: Any, total: dict[int, Any], view: Any) -> Any:
        return self.update(server, list(total.values()))


def replies_of(*uploads: Any) -> list[Reply]:
    return [Reply(ClientInfo(i, 1, "m"), u) for i, u in enumerate(uploads)]


VIEW: Any = ServerView(None, 3, Key((0,)))  # type: ignore[arg-type]


def test_several_faulty_replies_are_found_and_the_rest_is_used() -> None:
    def update(server: float, uploads: Any) -> float:
        return float(server + sum(1 / u for u in uploads))

    server, dropped = aggregate(Stub(update), 1.0, replies_of(1, 0, 2, "x", None, 4, "refused at once"), VIEW)
    assert server == 1 + 1 + 0.5 + 0.25
    actual = {
        i: d.split(": ")[1].replace("Stub cannot use the reply of client 6", "ValueError")
        for i, d in dropped.items()
    }
    assert actual == {1: "ZeroDivisionError", 3: "TypeError", 4: "TypeError", 6: "ValueError"}


def test_a_fault_of_the_method_is_raised_and_not_blamed_on_a_client() -> None:
    def together(server: Any, uploads: Any) -> Any:
        if len(uploads) > 1:
            raise ValueError("only together")
        return server

    with pytest.raises(ValueError, match="only together"):
        aggregate(Stub(together), 1.0, replies_of(1, 2, 3), VIEW)

    def still(server: Any, uploads: Any) -> Any:
        if 0 in uploads:
            raise ValueError("a culprit")
        if len(uploads) > 1:
            raise KeyError("and still")
        return server

    with pytest.raises(KeyError, match="and still"):
        aggregate(Stub(still), 1.0, replies_of(0, 1, 2), VIEW)


def test_faults_that_are_nobody_s_are_not_caught() -> None:
    def stopped(server: Any, uploads: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aggregate(Stub(stopped), 1.0, replies_of(1, 2), VIEW)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_state_that_is_not_finite_is_never_returned(bad: float, as_tensor: bool) -> None:
    def update(server: Any, uploads: Any) -> Any:
        total = sum(uploads)
        return {
            "ok": [torch.ones(2)],
            "deep": {"x": torch.tensor([1.0, total]) if as_tensor else float(total)},
        }

    server, dropped = aggregate(Stub(update), None, replies_of(1.0, bad, 2.0), VIEW)
    assert float(server["deep"]["x"][1] if as_tensor else server["deep"]["x"]) == 3
    assert "Stub, round 4: the server's new state would hold a NaN or an infinity at /deep/x" in dropped[1]
    # two that are finite alone and not together: nobody can be named
    large = 2e38 if as_tensor else 1.5e308
    with pytest.raises(FedlowrankError, match="would hold a NaN or an infinity at /deep/x"):
        aggregate(Stub(update), None, replies_of(large, large), VIEW)


def test_where_all_are_to_blame_the_state_stays() -> None:
    def update(server: Any, uploads: Any) -> Any:
        raise RuntimeError("no")

    server, dropped = aggregate(Stub(update), {"x": 1.0}, replies_of(1, 2), VIEW)
    assert server == {"x": 1.0}
    assert set(dropped) == {0, 1}
