"""Make the pages of the site that come from the package; mkdocs-gen-files runs this file in every `mkdocs build`."""

from __future__ import annotations

import sys
from pathlib import Path

import mkdocs_gen_files

if __name__ == "__main__":
    # outside of a build the pages would be written into this folder
    raise SystemExit("run `make docs`; no page has to be made by hand")

sys.path.insert(0, str(Path(__file__).parent))

import command_pages
import method_pages
import notebook_pages
import reference
import root_pages

for module in (command_pages, method_pages, notebook_pages, reference, root_pages):
    for path, content in module.make_pages().items():
        with mkdocs_gen_files.open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
