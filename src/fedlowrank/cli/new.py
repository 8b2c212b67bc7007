"""The command ``new``: a folder with an experiment, a model, data, a metric and a test, ready to run."""

from __future__ import annotations

import importlib.util
import keyword
import re
import runpy
import shlex
import shutil
from importlib.resources import files
from pathlib import Path

from ..core.errors import CheckpointError, ConfigError
from ..core.io.atomic_files import as_checkpoint_error
from .terminal import OUT

ENDING = ".template"
"""Ending of the template files of a project; ``NAME`` in their texts and names is replaced by the project's name."""


def new(path: Path) -> int:
    """Make a project.

    Args:
        path: path of the new folder. Python imports its code by the folder's name, so characters that a package name
            cannot have become underscores.

    Raises:
        ConfigError: if Python could not import the name, or another package has it.
        CheckpointError: if the folder exists or cannot be written; a new folder is then removed.
    """
    name = choose_name(path.name)
    folder = path.with_name(name) if path.name else path
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} exists already; choose another name, or remove it")
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True)
        try:
            _write_project(folder, name)
        except BaseException:
            # a part of a project is of no use, and would be in the way of the next attempt
            shutil.rmtree(folder, ignore_errors=True)
            raise
    if name != path.name:
        OUT.print(f"{path.name!r} is no name of a Python package, so the folder is {name}", style="yellow")
    OUT.print(f"made {folder}: {', '.join(sorted(entry.name for entry in folder.iterdir()))}")
    prefix = "" if folder.parent == Path() else f"cd {shlex.quote(str(folder.parent))} && "
    OUT.print(f"next: {prefix}fedlowrank compare {name}/experiment.toml", soft_wrap=True)
    return 0


def _write_project(folder: Path, name: str) -> None:
    """Write the files of a project into an empty folder."""
    for source in (files(__package__) / "project").iterdir():
        if source.name.endswith(ENDING):
            target = folder / source.name.removesuffix(ENDING).replace("NAME", name)
            target.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
    (folder / "__init__.py").write_text(f'"""The project {name}."""\n', encoding="utf-8")
    # as `python NAME/data.py` does
    runpy.run_path(str(folder / "data.py"), run_name="__main__")


def choose_name(text: str) -> str:
    """Name of a project: the text with an underscore for characters that the name of a Python package cannot have.

    Raises:
        ConfigError: if nothing is left, or code of this name would hide another package.
    """
    name = re.sub(r"\W+", "_", text).strip("_")
    if not name:
        raise ConfigError(f"{text!r} cannot be the name of a project; take letters, such as my_project")
    if not name[0].isalpha():
        name = f"project_{name}"
    if keyword.iskeyword(name) or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"Python knows {name!r} as another {'word' if keyword.iskeyword(name) else 'package'}; take another name, "
            f"such as my_{name}"
        )
    return name
