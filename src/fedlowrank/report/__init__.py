"""From run folders to something to read: a page, a table, TensorBoard event files."""

from __future__ import annotations

from .gallery import save_figures
from .groups import in_order
from .tables import Comparison, comparison, render_terminal
from .tensorboard import export_tensorboard
from .write import write_report

__all__ = [
    "Comparison",
    "comparison",
    "export_tensorboard",
    "in_order",
    "render_terminal",
    "save_figures",
    "write_report",
]
