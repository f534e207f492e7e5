"""Line plots in SVG: what is drawn, where, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from svg_plot import BOTTOM, LEFT, RIGHT, TOP, Line, write_plot

SVG = "{http://www.w3.org/2000/svg}"


def plot(tmp_path: Path, lines: list[Line], **options: bool) -> ElementTree.Element:
    write_plot(tmp_path / "plot.svg", "a < b", lines, x_label="x & y", y_label="y", **options)
    return ElementTree.parse(tmp_path / "plot.svg").getroot()


def dots(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]


def test_points_are_in_the_frame_in_the_order_of_their_values(tmp_path):
    root = plot(tmp_path, [Line("up", [0, 1, 4], [-1, 0, 7]), Line("down <", [0, 4], [5, 5], [3, 0])])
    points = dots(root)
    assert len(points) == 5
    assert all(LEFT < x < RIGHT and TOP < y < BOTTOM for x, y in points)
    (x0, y0), (x1, y1), (x2, y2) = points[:3]
    assert x0 < x1 < x2
    assert y0 > y1 > y2  # pixels count downwards
    assert (x2 - x1) / (x1 - x0) == pytest.approx(3, rel=0.01)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "x & y", "y", "up", "down <"} <= set(texts)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors_and_leaves_out_zero(tmp_path):
    points = dots(plot(tmp_path, [Line("a", [1, 10, 100, 0], [1e-3, 1, 1e3, 0])], log_x=True, log_y=True))
    assert len(points) == 3
    for axis in (0, 1):
        first, second, third = (point[axis] for point in points)
        assert second - first == pytest.approx(third - second, abs=0.2)


def test_an_error_bar_that_reaches_below_zero_stays_in_the_frame_of_a_logarithmic_axis(tmp_path):
    root = plot(tmp_path, [Line("a", [1, 2], [1, 10], [5, 1])], log_y=True)
    bars = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") and "V" in path.get("d")]
    assert any(bar.split("V")[0].endswith(f"{BOTTOM:.1f}") for bar in bars)


def test_a_single_point_can_be_drawn_and_nothing_cannot(tmp_path):
    assert len(dots(plot(tmp_path, [Line("a", [3], [3])]))) == 1
    with pytest.raises(ValueError, match="no point to draw"):
        plot(tmp_path, [Line("a", [1, 2], [0, -1])], log_y=True)
