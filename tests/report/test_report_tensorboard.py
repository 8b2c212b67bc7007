"""Event files, read back with TensorBoard's own reader."""

import builtins
import sys
import warnings

import pytest
from report_runs import rounds_of

from fedlowrank.core.errors import ConfigError
from fedlowrank.report import export_tensorboard


def test_event_file_reads_back(make_run, tmp_path):
    pytest.importorskip("tensorboard")
    rows = rounds_of([[0.25, 0.75], [0.5, None], [1.0, 0.5]])
    rows[1]["loss"]["bad"] = float("nan")
    with warnings.catch_warnings():
        # TensorBoard's own use of its dependencies, nothing that this package could mend.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(tensorboard|google|pkg_resources).*")
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=r"(?i).*(tensorboard|protobuf).*")
        export_tensorboard(make_run("a", rounds=rows), tmp_path / "events")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "events"))
        events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "accuracy/personal/test",
        "accuracy/personal/val",
        "bytes/up",
        "bytes/down",
        "bytes/total",
    } <= tags
    assert {"loss/local", "seconds/train", "seconds/server", "seconds/evaluate"} <= tags
    assert "loss/bad" not in tags
    got = [(event.step, event.value) for event in events.Scalars("accuracy/personal/test")]
    assert got == [(0, 0.5), (1, 0.5), (2, 0.75)]
    assert [event.value for event in events.Scalars("bytes/total")] == [0, 1500, 3000]


def test_missing_tensorboard_names_the_extra(make_run, tmp_path, monkeypatch):
    real = builtins.__import__

    def fake(name, *rest, **more):
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ConfigError, match=r"fedlowrank\[tensorboard\]"):
        export_tensorboard(make_run("a"), tmp_path)
