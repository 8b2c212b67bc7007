"""A process of Flower that is a line of shell."""

from __future__ import annotations

from pathlib import Path

from fedlowrank.network.deploy.flower_process import (
    FlowerProcess,
)


class ShellProcess(FlowerProcess):
    """A program that is a line of shell."""

    def __init__(self, home: Path, script: str) -> None:
        super().__init__(home, "script", "127.0.0.1:1")
        self.script = script

    def start(self) -> None:
        self._prepare()
        self._launch(["sh", "-c", self.script, str(self.process_folder)])

    def wait_for(self, word: str, seconds: float) -> None:
        self._wait_until(lambda: word in self.tail(), f"it had said {word}", seconds)
