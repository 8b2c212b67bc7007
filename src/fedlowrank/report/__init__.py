"""Reports of run folders: an HTML page, tables, figures and TensorBoard event files."""

from __future__ import annotations

from .gallery import save_figures
from .groups import in_order
from .latex import to_latex
from .page import write_report
from .tables import Comparison, comparison, render_terminal
from .tensorboard import export_tensorboard
from .value_rows import write_values

__all__ = [
    "Comparison",
    "comparison",
    "export_tensorboard",
    "in_order",
    "render_terminal",
    "save_figures",
    "to_latex",
    "write_report",
    "write_values",
]
