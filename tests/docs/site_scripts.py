"""The modules that build the site, loaded from ``docs/site/``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


DOCS = ROOT / "docs"


SITE = DOCS / "site"


def load_site_script(name: str) -> ModuleType:
    """A module of ``docs/site/``."""
    # scripts import each other
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
