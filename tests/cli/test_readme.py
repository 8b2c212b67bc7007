"""What the README shows is what users get."""

import re
from pathlib import Path

import pytest

from fedlowrank.cli.main import main
from fedlowrank.methods import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_fits_on_two_screens() -> None:
    assert len(README.splitlines()) <= 120


def test_the_ten_lines_are_the_example_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert (ROOT / "examples" / "first.py").read_text().endswith('"""\n\n' + block)
    assert block.count("rounds=40") == 1
    exec(compile(block.replace("rounds=40", "rounds=2"), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    # the same words; the numbers are those of forty rounds
    assert [re.sub(r"[\d.]+%", "%", line) for line in lines] == re.sub(r"[\d.]+%", "%", shown).splitlines()


@pytest.mark.full
def test_the_ten_lines_print_the_numbers_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    expected, actual = (re.findall(r"([\d.]+)%", text) for text in (shown, capsys.readouterr().out))
    # other processors round otherwise; a test digit of one client more or less is 0.2 points
    assert [float(a) for a in actual] == pytest.approx([float(a) for a in expected], abs=2)


@pytest.mark.full
def test_its_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = set(re.findall(r"^fedlowrank (\w+)", README, re.MULTILINE))
    assert commands >= {"compare", "tune", "resume", "run", "list"}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
    capsys.readouterr()


def test_its_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_it_counts_the_methods() -> None:
    assert "Forty other methods" in README
    assert len(METHODS) == 44
