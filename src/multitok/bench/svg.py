"""Small charts as SVG text: lines over steps of a sweep, and stacked bars. No library, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 44, 48
_TICKS = 5


class Series(msgspec.Struct, frozen=True):
    """Values of one thing, one per step of the sweep; None where there is none."""

    name: str
    values: Sequence[float | None]


def _nice_top(value: float) -> float:
    """Return a round number that isn't below `value`."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return float(next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= value * 0.999))


class _Frame:
    """Axes: equal distances between the steps of the sweep, a linear scale from 0 upwards."""

    def __init__(self, title: str, x_label: str, y_label: str, steps: Sequence[str], top: float) -> None:
        self._steps = steps
        self.top = _nice_top(top)
        self.parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
            f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
            f'<text class="label" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" '
            f'text-anchor="middle">{escape(x_label)}</text>',
            f'<text class="label" x="{_WIDTH - _RIGHT}" y="16" text-anchor="end">{escape(y_label)}</text>',
        ]
        for tick in range(_TICKS + 1):
            value = self.top * tick / _TICKS
            y = self.y(value)
            self.parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.4g}</text>'
            )
        for i, step in enumerate(steps):
            self.parts.append(
                f'<text class="tick" x="{self.x(i):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{escape(step)}</text>'
            )

    def x(self, index: int) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        return _LEFT + width * (index + 0.5) / max(len(self._steps), 1)

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / self.top)

    def legend(self, names: Sequence[str]) -> None:
        x = float(_LEFT)
        for i, name in enumerate(names):
            color = COLORS[i % len(COLORS)]
            self.parts.append(f'<rect x="{x:.0f}" y="24" width="10" height="10" fill="{color}"/>')
            self.parts.append(f'<text class="tick" x="{x + 14:.0f}" y="33">{escape(name)}</text>')
            x += 30 + 6.5 * len(name)

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"])


def line_chart(title: str, x_label: str, y_label: str, steps: Sequence[str], series: Sequence[Series]) -> str:
    """Return a chart with a line per series.

    Parameters
    ----------
    title, x_label, y_label : str
        What it shows.
    steps : sequence of str
        Names of the steps on the x axis.
    series : sequence of Series
        A value per step each.
    """
    top = max((value for one in series for value in one.values if value is not None), default=0.0)
    frame = _Frame(title, x_label, y_label, steps, top)
    for k, one in enumerate(series):
        color = COLORS[k % len(COLORS)]
        points = [(frame.x(i), frame.y(value), value) for i, value in enumerate(one.values) if value is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        frame.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y, value in points:
            frame.parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}">'
                f"<title>{escape(one.name)}: {value:,.4g}</title></circle>"
            )
    frame.legend([one.name for one in series])
    return frame.done()


def stacked_bars(title: str, x_label: str, y_label: str, steps: Sequence[str], series: Sequence[Series]) -> str:
    """Return a chart with a bar per step, made of one part per series; see `line_chart`."""
    sums = [sum(one.values[i] or 0.0 for one in series) for i in range(len(steps))]
    frame = _Frame(title, x_label, y_label, steps, max(sums, default=0.0))
    width = min(56.0, 0.6 * (_WIDTH - _LEFT - _RIGHT) / max(len(steps), 1))
    for i in range(len(steps)):
        base = 0.0
        for k, one in enumerate(series):
            value = one.values[i] or 0.0
            low, high = frame.y(base), frame.y(base + value)
            base += value
            frame.parts.append(
                f'<rect x="{frame.x(i) - width / 2:.1f}" y="{high:.1f}" width="{width:.1f}" height="{low - high:.1f}" '
                f'fill="{COLORS[k % len(COLORS)]}"><title>{escape(one.name)}: {value:,.4g}</title></rect>'
            )
    frame.legend([one.name for one in series])
    return frame.done()
