"""Reports of run folders: an HTML page, tables, figures and TensorBoard event files."""

from __future__ import annotations

from .figures.gallery import save_figures
from .formats.latex import to_latex
from .formats.page import write_report
from .formats.tensorboard import export_tensorboard
from .formats.terminal_view import render_terminal
from .formats.value_rows import write_values
from .run_comparison import Comparison, compare_runs
from .statistics.experiments import sort_runs

__all__ = [
    "Comparison",
    "compare_runs",
    "export_tensorboard",
    "render_terminal",
    "save_figures",
    "sort_runs",
    "to_latex",
    "write_report",
    "write_values",
]
