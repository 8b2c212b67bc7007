"""Notebooks as pages: Markdown cells as they are, code cells with the outputs that are stored in the notebook.

`python docs/site/notebook_pages.py` executes the notebooks anew and stores their outputs; it needs nbclient.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def make_pages() -> dict[str, str | bytes]:
    """The pages and their pictures by path, with a page that lists them."""
    pages: dict[str, str | bytes] = {}
    links = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = convert(path)
        pages[f"notebooks/{path.stem}.md"] = page
        pages |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
        title = re.search(r"^# (.*)", page, re.MULTILINE)
        if title is None:
            raise ValueError(f"{path} needs a first cell with a title, such as '# Compare methods'")
        links.append((title[1], f"{path.stem}.md"))
    listed = "".join(f"- [{title}]({link})\n" for title, link in links)
    pages["notebooks/index.md"] = (
        "# Notebooks\n\nEach runs in seconds on a CPU, on data that come with the package. The tests execute them. "
        f"To open them, install Jupyter and the extra `notebook`, and take the files of `docs/notebooks/`.\n\n{listed}"
    )
    return pages


def convert(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a Markdown page and its pictures by file name.

    Raises:
        ValueError: if a stored output is an error.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output, path.stem, pictures) for output in cell["outputs"]]
    parts.insert(1, f"[Download this notebook]({path.name})")
    return "\n\n".join(parts) + "\n", pictures


def _output(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    """One output of a cell; a table rather than its text, a picture rather than either."""
    if output["output_type"] == "error":
        raise ValueError(f"{stem}.ipynb has a cell that failed: {output['ename']}: {output['evalue']}")
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "image/png" in data:
        name = f"{stem}-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode(data["image/png"])
        return f'<div class="output" markdown>\n![Picture {len(pictures)}]({name})\n</div>'
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>\n?", "", data["text/html"], flags=re.DOTALL)
        return f'<div class="output">\n{table}\n</div>'
    return _text(data["text/plain"])


def _text(text: str) -> str:
    return f'<div class="output" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>'


def execute(path: Path) -> None:
    """Run a notebook from the start and store its outputs in it, without times and counters."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    # by Unix sockets, so that no port is opened
    sockets = Config(ConnectionFileMixin={"transport": "ipc"})
    NotebookClient(notebook, config=sockets, timeout=120, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = None
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="Execute the notebooks anew and store their outputs in them."
    ).parse_args()
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        execute(file)
        print(file.name)
