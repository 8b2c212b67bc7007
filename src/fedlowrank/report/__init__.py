"""Reports of run folders: an HTML page, tables, figures and TensorBoard event files."""

from __future__ import annotations

from .gallery import save_figures
from .groups import in_order
from .page import write_report
from .tables import Comparison, comparison, render_terminal
from .tensorboard import export_tensorboard

__all__ = [
    "Comparison",
    "comparison",
    "export_tensorboard",
    "in_order",
    "render_terminal",
    "save_figures",
    "write_report",
]
