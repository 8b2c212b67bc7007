"""Look of figures: one style per method, and SVG that follows the page between light and dark mode.

Figures are drawn with placeholder colors. :func:`to_svg` turns those into ``currentColor`` and CSS variables
with the light color as fallback, so that one drawing serves both modes and print.
"""

from __future__ import annotations

import colorsys
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from ...core.errors import ConfigError
from ...core.io.atomic_files import write_atomically
from ...core.io.text import on_one_line

# Both lists maximize the smallest distance in Oklab between any two colors, for normal vision, protanopia,
# deuteranopia and tritanopia, at a contrast of at least 3:1 with the background.
LIGHT = ("#0071a2", "#da7805", "#3a9f93", "#c73cef", "#8c6106", "#1c0085", "#540213", "#4d4d4c")
DARK = ("#2789a0", "#e4a004", "#64cead", "#c194fc", "#a3fa44", "#cd19fd", "#e14344", "#f8efe6")

INK = "#010203"  # placeholder of the text color
PAPER = "#fdfcfb"  # placeholder of the background color
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.5), (6, 1.8, 1.2, 1.8))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h")

# Widths of a figure, in inches of 72 units each: on a page, where text must stay legible on a phone, and in one
# column of a paper with two.
WIDTHS = {"page": 5.3, "column": 3.3}
_COLUMN_FONTS = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "figure.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
_COLUMN_HEIGHT = 0.72  # height of a figure in a column, relative to that on a page
_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"

# Matplotlib settings that embed TrueType fonts: publishers reject Type 3, matplotlib's own choice.
EMBEDDED_FONTS: dict[Any, Any] = {"pdf.fonttype": 42, "ps.fonttype": 42}
_SETTINGS = {
    "svg.fonttype": "none",
    **EMBEDDED_FONTS,
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.labelsize": 10.5,
    "axes.titlesize": 9.5,
    "figure.labelsize": 10.5,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Style:
    """The look of one method in every figure."""

    color: str  # placeholder of the color
    dash: tuple[float, ...]  # lengths of dashes and gaps, empty for a solid line
    marker: str

    @property
    def line(self) -> Any:
        """The dash as matplotlib's ``linestyle``."""
        return (0.0, self.dash) if self.dash else "-"

    def series_style(self, series_index: int) -> Style:
        """Style of a series of the method: same color and marker, with another dash from index 1 on."""
        # Skip one dash, because another method of the same color may have the next one.
        dash_index = DASHES.index(self.dash) + (series_index + 1 if series_index else 0)
        return replace(self, dash=DASHES[dash_index % len(DASHES)])

    @property
    def rgb(self) -> tuple[float, float, float]:
        """Color as numbers, to which an opacity can be added."""
        return to_rgb(self.color)


Styles = Mapping[str, Style]


class Tip(NamedTuple):
    """A value that is shown where the pointer rests on a figure."""

    axes: Axes
    x: float  # position in the units of the axes
    y: float
    text: str


@dataclass(frozen=True)
class Picture:
    """A figure with its texts."""

    figure: Figure
    title: str
    alt: str  # description of the figure for readers who cannot see it
    caption: str  # explanation of the content, form and data of the figure
    small: bool = False  # whether three such figures fit side by side
    tips: tuple[Tip, ...] = ()  # values to show on the page, the topmost last
    slot: Literal["result", "curve", ""] = ""  # prominent place of the figure on the page; empty for none


Width = Literal["page", "column"]
_FINAL: ContextVar[bool] = ContextVar("final colors", default=False)
_WIDTH: ContextVar[Width] = ContextVar("width of figures", default="page")


@contextmanager
def final_colors() -> Iterator[None]:
    """Draw in the final light colors, for separate files, instead of in placeholders for a page."""
    token = _FINAL.set(True)
    try:
        yield
    finally:
        _FINAL.reset(token)


@contextmanager
def drawing_width(width: Width) -> Iterator[None]:
    """Draw figures of the given width, with matching font sizes."""
    token = _WIDTH.set(width)
    try:
        yield
    finally:
        _WIDTH.reset(token)


def figure_width() -> float:
    """Width of a figure in inches."""
    return WIDTHS[_WIDTH.get()]


def figure_height(height: float) -> float:
    """Height, in inches, of a figure that is ``height`` high on a page."""
    return height * (_COLUMN_HEIGHT if _WIDTH.get() == "column" else 1.0)


def palette_color(index: int) -> str:
    """Placeholder of a palette color."""
    return LIGHT[index % len(LIGHT)] if _FINAL.get() else f"#0a00{index % len(LIGHT):02x}"


def hue_color(index: int, count: int) -> str:
    """Placeholder of one of many evenly spaced hues; neighbors also differ in lightness."""
    hue = round(256 * index / count) % 256
    if _FINAL.get():
        return to_hex(colorsys.hls_to_rgb(hue / 256, (0.28, 0.43)[index % 2], 0.7))
    return f"#0b{hue:02x}{index % 2:02x}"


def make_styles(labels: Sequence[str]) -> dict[str, Style]:
    """Make a style for each label, by its index; distinct for 32 labels and, with its marker, for 96."""
    n = len(LIGHT)
    return {
        label: Style(palette_color(i), DASHES[style_index % len(DASHES)], MARKERS[style_index % len(MARKERS)])
        for i, label in enumerate(dict.fromkeys(labels))
        for style_index in (i + i // n,)
    }


@contextmanager
def drawing() -> Iterator[None]:
    """Use the report's drawing settings and ignore the user's matplotlibrc; also a decorator."""
    fonts: dict[Any, Any] = dict(_COLUMN_FONTS) if _WIDTH.get() == "column" else {}
    with warnings.catch_warnings(), matplotlib.style.context(["default", _SETTINGS, fonts]):
        # Matplotlib only measures text with the font; the browser has the glyph.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        yield


def new_figure(height: float, width: float | None = None) -> tuple[Figure, Axes]:
    """Make an empty figure with one axes, with sizes in inches on a page."""
    max_width = figure_width()
    figure = Figure(figsize=(min(width or max_width, max_width), figure_height(height)), layout="constrained")
    return figure, figure.add_subplot()


def new_panels(height: float, rows: int, columns: int, *, sharey: bool) -> tuple[Figure, Any]:
    """Make an empty figure with ``[rows, columns]`` axes that share their horizontal limits, or both."""
    figure = Figure(figsize=(figure_width(), figure_height(height)), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False)


def add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Add a legend below the axes, in as many columns as the longest label leaves room for."""
    # Matplotlib drops labels that begin with an underscore.
    texts = [on_one_line(label, 44) for label in labels]
    texts = ["\u200b" * text.startswith("_") + text for text in texts]
    if not texts:
        return
    size = float(matplotlib.rcParams["legend.fontsize"])
    column_limit = figure.get_figwidth() * 72 / ((max(map(len, texts)) * 0.57 + 4) * size)
    max_columns = max(1, min(4, int(column_limit)))
    # No column is left half empty: five entries fill three columns and not four.
    columns = math.ceil(len(texts) / math.ceil(len(texts) / max_columns))
    # The axes keep their height for any number of methods.
    figure.set_figheight(figure.get_figheight() + 0.0232 * size * math.ceil(len(texts) / columns))
    figure.legend(
        list(handles), texts, loc="outside lower center", ncols=columns, handlelength=2.5, columnspacing=1.2,
        labelspacing=0.35,
    )  # fmt: skip


def css_variables(light: Sequence[str], dark: Sequence[str]) -> str:
    """Write the declarations of the palettes for a style sheet."""
    light_rules, dark_rules = (
        "".join(f"--s{i}:{color};" for i, color in enumerate(colors)) for colors in (light, dark)
    )
    return f":root{{{light_rules}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark_rules}}}}}\n"


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file completely or not at all; the ending of its name chooses the format.

    Raises:
        ConfigError: if the format is not known.
        CheckpointError: if the file cannot be written.
    """
    buffer = io.BytesIO()
    try:
        with matplotlib.rc_context(EMBEDDED_FONTS):
            figure.savefig(buffer, format=path.suffix[1:] or None)
    except ValueError as error:
        raise ConfigError(f"cannot draw {path}: {error}") from error
    write_atomically(path, buffer.getvalue())


def to_svg(figure: Figure, name: str, tips: Sequence[Tip] = ()) -> str:
    """Render a figure as SVG text for the inside of a page.

    Args:
        figure: figure that was drawn within :func:`drawing`.
        name: name that is unique on the page; identifiers of different names differ.
        tips: values that a browser shows where the pointer rests.

    Returns:
        One ``<svg>`` element without declaration, metadata, style sheet or size. Equal figures give equal
        text.
    """
    buffer = io.BytesIO()
    with drawing():
        matplotlib.rcParams["svg.hashsalt"] = name
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ET.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style") or not isinstance(child.tag, str):
                parent.remove(child)
    attributes = [value for element in root.iter() for value in element.attrib.values()]
    used_ids = set(re.findall(r"(?:^|url\()#([^)\s]+)", "\n".join(attributes), re.MULTILINE))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        attrib = {key.removeprefix(_XLINK): _rewrite(key, text) for key, text in element.attrib.items()}
        if attrib.get("id") not in used_ids:
            # Names such as axes_1 appear in every drawing.
            attrib.pop("id", None)
        element.attrib = {key: value for key, value in attrib.items() if value}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "stroke-linejoin": "round"}
    root.extend(_draw_tip(tip, figure) for tip in tips)
    root.attrib |= {"aria-hidden": "true", "focusable": "false"}
    return ET.tostring(root, encoding="unicode")


def _draw_tip(tip: Tip, figure: Figure) -> ET.Element:
    """Draw an invisible circle with a title, in the units of the drawing: 72 per inch, from the top."""
    x, y = tip.axes.transData.transform((tip.x, tip.y)) * 72 / figure.dpi
    top = figure.get_figheight() * 72
    attributes = {"cx": _shorten(f"{x:.3f}"), "cy": _shorten(f"{top - y:.3f}"), "r": "5"}
    circle = ET.Element("circle", attributes | {"fill": "none", "pointer-events": "all"})
    ET.SubElement(circle, "title").text = on_one_line(tip.text)
    return circle


def _rewrite(key: str, value: str) -> str:
    """Rewrite the value of an attribute for the page."""
    if key == "style":
        return _rewrite_style(value)
    return _shorten(value) if key in ("d", "x", "y", "transform", "points") else value


def _rewrite_style(style: str) -> str:
    style = style.replace(INK, "currentColor").replace(PAPER, "var(--paper,#fff)")
    style = re.sub(r"#0a00([0-9a-f]{2})", lambda m: f"var(--s{int(m[1], 16)},{LIGHT[int(m[1], 16)]})", style)
    # The page chooses the lightness, as for the palette.
    style = re.sub(
        r"#0b([0-9a-f]{2})0([01])",
        lambda m: f"hsl({round(int(m[1], 16) * 360 / 256)} 70% var(--l{m[2]},{(28, 43)[int(m[2])]}%))",
        style,
    )
    style = re.sub(r"font: (?:[a-z]+ )*([\d.]+)px[^;]*", r"font-size:\1px", style)
    return _shorten(re.sub(r"\s*([:;])\s*", r"\1", style))


def _shorten(text: str) -> str:
    """Round numbers to two decimals, because a hundredth of a point is invisible."""
    short = re.sub(r"(?<![#\w.])-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), text)
    return re.sub(r"\s+", " ", short).strip()
