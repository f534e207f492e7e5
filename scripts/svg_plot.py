"""Line plots as small SVG files that a Markdown page shows inline: `![caption](plot.svg)`.

    write_plot(path, "title", [Line("first", xs, ys, errors)], x_label="x", y_label="y", log_y=True)

No dependency; the background is white, so that the plot reads on dark pages too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 520, 44, 364  # the frame; the legend stands to its right
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")  # Okabe and Ito's


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        label: its name in the legend.
        xs, ys: its points; on a logarithmic axis those that are not positive are left out.
        errors: half lengths of the points' error bars; None draws none.
        dashed: for what the other lines are compared with.
        color: an index of `COLORS`; None takes the line's place in the plot.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    errors: Sequence[float] | None = None
    dashed: bool = False
    color: int | None = None


def write_plot(
    path: Path,
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Write the plot of `lines` to `path`.

    Raises:
        ValueError: no line has a point that can be drawn.
    """
    points = [_drawable(line, log_x, log_y) for line in lines]
    if not any(points):
        raise ValueError(f"the plot {title!r} has no point to draw; logarithmic axes leave out what is not positive")
    x_axis = _Axis.over([x for line in points for x, _, _ in line], log_x, LEFT, RIGHT)
    ends = [end for line in points for _, y, error in line for end in (y - error, y, y + error)]
    y_axis = _Axis.over([end for end in ends if end > 0 or not log_y], log_y, BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_frame(x_axis, y_axis, x_label, y_label),
    ]
    for number, (line, drawn) in enumerate(zip(lines, points, strict=True)):
        color = COLORS[(number if line.color is None else line.color) % len(COLORS)]
        parts += _draw(line, drawn, x_axis, y_axis, color, legend_y=TOP + 12 + 20 * number)
    path.write_text("\n".join([*parts, "</svg>", ""]))


@dataclass(frozen=True)
class _Axis:
    """From values to pixels; `low` and `high` are logarithms on a logarithmic axis."""

    low: float
    high: float
    log: bool
    first_pixel: float
    last_pixel: float

    @classmethod
    def over(cls, values: Sequence[float], log: bool, first_pixel: float, last_pixel: float) -> _Axis:
        scaled = [math.log10(value) if log else value for value in values]
        low, high = min(scaled), max(scaled)
        margin = 0.05 * (high - low) or 0.5
        return cls(low - margin, high + margin, log, first_pixel, last_pixel)

    def __call__(self, value: float) -> float:
        """The pixel of a value; what is off the axis, such as the lower end of an error bar, is moved to its end."""
        scaled = value
        if self.log:
            scaled = math.log10(value) if value > 0 else self.low
        share = min(max((scaled - self.low) / (self.high - self.low), 0), 1)
        return self.first_pixel + share * (self.last_pixel - self.first_pixel)

    def ticks(self) -> list[float]:
        if self.log:
            return self._decades((1,)) if self.high - self.low > 2 else self._decades((1, 2, 5))
        rough = (self.high - self.low) / 6
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _decades(self, factors: tuple[int, ...]) -> list[float]:
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [factor * 10.0**decade for decade in decades for factor in factors]
        return [value for value in values if self.low <= math.log10(value) <= self.high]


def _drawable(line: Line, log_x: bool, log_y: bool) -> list[tuple[float, float, float]]:
    errors = line.errors if line.errors is not None else [0.0] * len(line.xs)
    return [
        (x, y, error)
        for x, y, error in zip(line.xs, line.ys, errors, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str) -> list[str]:
    middle = (TOP + BOTTOM) / 2
    parts = []
    for value in x_axis.ticks():
        x = x_axis(value)
        parts.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{value:.4g}</text>')
    for value in y_axis.ticks():
        y = y_axis(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    return [
        *parts,
        f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}" fill="none" stroke="#888"/>',
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _draw(
    line: Line,
    points: Sequence[tuple[float, float, float]],
    x_axis: Callable[[float], float],
    y_axis: Callable[[float], float],
    color: str,
    *,
    legend_y: float,
) -> list[str]:
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    path = " L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y, _ in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'] if points else []
    for x, y, error in points:
        parts.append(f'<circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="3" fill="{color}"/>')
        if error:
            ends = f"M{x_axis(x):.1f} {y_axis(y - error):.1f}V{y_axis(y + error):.1f}"
            parts.append(f'<path d="{ends}" stroke="{color}"/>')
    legend_x = RIGHT + 14
    parts.append(
        f'<path d="M{legend_x} {legend_y}h24" stroke="{color}" stroke-width="2"{dashes}/>'
        f'<text x="{legend_x + 30}" y="{legend_y + 4}">{escape(line.label)}</text>'
    )
    return parts
