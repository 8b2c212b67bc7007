"""Reports of run folders: an HTML page, tables, figures and TensorBoard event files."""

from __future__ import annotations

from .figures.gallery import save_figures
from .page import write_report
from .statistics.experiments import in_order
from .tables.comparison_tables import Comparison, comparison, render_terminal
from .tables.latex import to_latex
from .tables.value_rows import write_values
from .tensorboard import export_tensorboard

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
