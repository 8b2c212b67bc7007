"""Event files, read back with TensorBoard's own reader."""

import resource
import signal
import sys
import threading
import warnings

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.report import export_tensorboard
from tests.report.report_runs import in_clusters, regression_of, rounds_of


def scalars(run, folder):
    """``(step, value)`` by tag."""
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        # TensorBoard's own use of its dependencies, nothing that this package could mend.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        export_tensorboard(run, folder)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.full
def test_event_file_reads_back(make_run, tmp_path):
    rows = rounds_of([[0.25, 0.75], [0.5, None], [1.0, 0.5]])
    rows[1]["training_losses"]["bad"] = float("nan")
    actual = scalars(make_run("a", rounds=rows), tmp_path)
    assert {"accuracy/personal/val", "bytes/up", "bytes/down"} <= actual.keys()
    assert {"training_loss/local", "seconds/train", "seconds/server", "seconds/evaluate"} <= actual.keys()
    assert "training_loss/bad" not in actual
    assert actual["accuracy/personal/test"] == [(0, 0.5), (1, 0.5), (2, 0.75)]
    assert actual["bytes/total"] == [(0, 0), (1, 1500), (2, 3000)]


def test_losses_routes_and_unseen_clients(make_run, tmp_path):
    rows = regression_of([[4, 4, 4, 8], [1, 2, 3, 9]])
    rows[1]["routes"] = [[1, 0], [0, 1], [1, 0], [1, 0]]
    actual = scalars(make_run("a", rounds=rows, clients=in_clusters([0, 1, 0, 1], unseen=[3])), tmp_path)
    assert not [tag for tag in actual if tag.startswith("accuracy")]
    assert actual["loss/personal/test"] == [(0, 4.0), (1, 2.0)]
    assert actual["loss/personal/test/unseen"] == [(0, 8.0), (1, 9.0)]
    assert actual["routes/recovery"] == [(1, 1.0)]
    assert actual["training_loss/local"] == [(1, 0.5)]


def test_missing_tensorboard_names_the_extra(make_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"fedlowrank\[tensorboard\]"):
        export_tensorboard(make_run("a"), tmp_path)


def test_an_error_of_the_disk_is_raised_and_not_printed_by_a_thread(make_run, tmp_path):
    """Pytest fails a test in which a thread ends by an error."""
    pytest.importorskip("tensorboard")
    run = make_run("a")
    # a file of more bytes than the limit cannot be written, as on a full disk
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            export_tensorboard(run, tmp_path / "events")
        # the thread ends by the error, too
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            if "tensorboard" in type(thread).__module__:
                thread.join(5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
