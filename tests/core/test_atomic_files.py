"""Files through symbolic links and open descriptors, and standard streams that cannot be written."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedlowrank.core.errors import CheckpointError
from fedlowrank.core.io.atomic_files import write_atomically
from fedlowrank.core.io.streams import TolerantStream


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("middle")
    (tmp_path / "middle").symlink_to(Path("folder") / "target")
    for data in (b"new", b"replaced"):  # the first time the link dangles
        write_atomically(link, data)
        assert link.is_symlink()
        assert (target.read_bytes(), target.is_symlink()) == (data, False)
    assert [p.name for p in target.parent.iterdir()] == ["target"]
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(CheckpointError, match="circle"):
        write_atomically(tmp_path / "circle", b"")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no /proc/self/fd")
def test_an_open_file_is_appended_to(tmp_path: Path) -> None:
    file, link = tmp_path / "output", tmp_path / "stdout"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    # as /dev/stdout is: a link to an open file
    link.symlink_to(f"/proc/self/fd/{descriptor}")
    os.write(descriptor, b"before ")
    write_atomically(link, b"table ")
    write_atomically(Path(f"/dev/fd/{descriptor}"), b"again ")
    os.write(descriptor, b"after")
    os.close(descriptor)
    assert file.read_bytes() == b"before table again after"
    assert link.is_symlink()


def test_a_tolerant_stream_is_copied_and_drops_lines() -> None:
    with Path("/dev/full" if Path("/dev/full").exists() else os.devnull).open("w") as full:
        stream = TolerantStream(full)
        assert copy.copy(stream).encoding == full.encoding
        stream.writelines(["a" * 10**6, "b"])
        stream.flush()
        assert (stream.error is None) == (full.name == os.devnull)


MAIN = f"{sys.executable} -m fedlowrank.cli.main"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_help_that_cannot_be_written_is_an_error() -> None:
    actual = subprocess.run(
        ["bash", "-c", f"{MAIN} --help > /dev/full"], capture_output=True, text=True, check=False
    )
    assert actual.returncode == 1
    assert actual.stderr == "error: cannot write the output: No space left on device\n"


def test_streams_that_the_process_lacks() -> None:
    code = "import sys; from fedlowrank.core.io.streams import tolerant_streams as s; w = s(); w.__enter__()"
    code = f"{code}; sys.exit(3 if sys.stdout is None else 4)"
    actual = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >&-', sys.executable, code], capture_output=True, check=False
    )
    assert (actual.returncode, actual.stderr) == (3, b"")
    # an error is not printed on the output instead
    code = "from fedlowrank.cli.main import show_log_messages, _LogHandler, logging as g\nwith show_log_messages(_LogHandler()):"
    actual = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, f"{code} g.getLogger('fedlowrank').warning('lost')"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert (actual.returncode, actual.stdout) == (0, b"")
