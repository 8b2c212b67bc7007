"""Formats numbers and names for people. The CSV does not use these functions, because it holds exact values."""

from __future__ import annotations

import math
import re

MISSING = "–"  # text in place of a missing number
DIGITS = 3  # significant digits of byte sizes, counts and durations everywhere
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_si(value: float | None, unit: str = "") -> str:
    """Format a byte size or a count, given in its base unit, with a decimal prefix, such as ``12.3 MB``."""
    if value is None or not math.isfinite(value):
        return MISSING
    for size, prefix in _PREFIXES:
        # Half a unit in the last place keeps 999 999 from being shown as 1000 k.
        if abs(value) >= size * (1 - 0.5 * 10.0**-DIGITS):
            return f"{_significant(value / size)} {prefix}{unit}".rstrip()
    number = f"{value:.0f}" if float(value).is_integer() else _significant(value)
    return f"{number} {unit}".rstrip()


def format_si_pair(value: float | None, plus_minus: float | None, unit: str = "") -> str:
    """Format a quantity and its spread with one decimal prefix, such as ``6.69 ± 0.56 M``; no spread if it is 0."""
    text = format_si(value, unit)
    if not plus_minus or not math.isfinite(plus_minus) or text == MISSING:
        return text
    digits, _, suffix = text.partition(" ")
    size = next((size for size, prefix in _PREFIXES if suffix == f"{prefix}{unit}"), 1.0)
    return f"{digits} ± {plus_minus / size:.{len(digits.partition('.')[2])}f} {suffix}".rstrip()


def format_tick(value: float, unit: str) -> str:
    """Format a round quantity with a decimal prefix and no needless digits, for an axis."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:g} {prefix}{unit}"
    return f"{value:g} {unit}"


def format_percent(value: float | None, digits: int = 2) -> str:
    """Format a fraction as a percentage without the sign, such as ``93.12``."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}"


def format_percent_pair(value: float | None, plus_minus: float | None) -> str:
    """Format a fraction and its spread as percentages, such as ``93.12 ± 4.10``."""
    if plus_minus is None or not math.isfinite(plus_minus):
        return format_percent(value)
    return f"{format_percent(value)} ± {format_percent(plus_minus)}"


def format_loss(value: float | None, digits: int = 4) -> str:
    """Format a loss with ``digits`` significant digits, such as ``0.01234`` or ``1.234e-06``."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:#.{digits}g}".rstrip(".")


def format_loss_pair(value: float | None, plus_minus: float | None) -> str:
    """Format a loss and its spread to the same decimal, such as ``0.0123 ± 0.0011``; the spread has two digits."""
    if value is None or plus_minus is None or not math.isfinite(value) or not math.isfinite(plus_minus):
        return format_loss(value)
    spread_text = format_loss(plus_minus, 2)
    if plus_minus == 0 or "e" in format_loss(value) + spread_text:
        return f"{format_loss(value)} ± {spread_text}"
    decimals = max(len(text.partition(".")[2]) for text in (spread_text, format_loss(value, 2)))
    return f"{value:.{decimals}f} ± {plus_minus:.{decimals}f}"


def format_seconds(value: float | None) -> str:
    """Format a duration: seconds below two minutes, then minutes, then hours."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 120:
        return f"{_significant(value)} s"
    if value < 7200:
        return f"{_significant(value / 60)} min"
    return f"{_significant(value / 3600)} h"


def format_number(value: float | None) -> str:
    """Format a number without a prefix: integers whole, other numbers with one decimal."""
    if value is None or not math.isfinite(value):
        return MISSING
    # 100 · 0.14 is 14.000000000000002
    return f"{value:.0f}" if math.isclose(value, round(value), abs_tol=1e-9) else f"{value:.1f}"


def format_p(value: float | None) -> str:
    """Format a p-value with two significant digits, or as ``< 0.001``."""
    if value is None or not math.isfinite(value):
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def state_p(value: float) -> str:
    """Write a p-value with its relation, such as ``p = 0.03`` or ``p < 0.001``."""
    text = format_p(value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def format_signed(text: str) -> str:
    """Write formatted numbers with typographic minus signs, and without the sign of zeros such as ``-0.0``."""
    return re.sub(r"-(?=0(\.0*)?(?![\d.e]))", "", text).replace("-", "−")


def _significant(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(abs(value) * (1 + 0.5 * 10.0**-DIGITS))))
    return f"{value:.{min(decimals, 6)}f}"
