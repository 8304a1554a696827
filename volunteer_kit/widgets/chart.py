"""The loss curve as a small inline SVG: no script, no library, readable in light and dark."""

from __future__ import annotations

import math

WIDTH, HEIGHT = 760, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 60, 28, 30  # room for the axes' labels
TITLE = "Loss – how wrong the model still is; lower is better"


def loss_chart(points: list[tuple[int, float]]) -> str:
    """SVG of (step, loss); finite numbers only. Of one size, also while there is nothing to draw."""
    head = f'<text class="vk-title" x="0" y="14">{TITLE}</text>'
    if len(points) < 2:
        middle = f'x="{WIDTH / 2}" y="{HEIGHT / 2 + 8}" text-anchor="middle"'
        return _svg(f"{head}{_grid([], 0, 1)}<text {middle}>The curve begins with the second step.</text>")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    marks = ticks(min(ys), max(ys))
    low, high = min(marks[0], min(ys)), max(marks[-1], max(ys))
    first, last = min(xs), max(max(xs), min(xs) + 1)
    spots = [(_x(x, first, last), _y(y, low, high)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    floor = HEIGHT - BOTTOM
    area = f"{spots[0][0]:.1f},{floor} {line} {spots[-1][0]:.1f},{floor}"
    end_x, end_y = spots[-1]
    return _svg(
        f'{head}{_grid(marks, low, high)}<polygon class="vk-area" points="{area}"/>'
        f'<polyline class="vk-curve" points="{line}"/>'
        f'<circle class="vk-end" cx="{end_x:.1f}" cy="{end_y:.1f}" r="4"/>'
        f'<text class="vk-title" x="{end_x + 9:.1f}" y="{end_y + 4:.1f}">{ys[-1]:.2f}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 9}">{first:,}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 9}" text-anchor="end">{last:,}</text>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 9}" text-anchor="middle">global step</text>'
    )


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers around [low, high]."""
    spread = max(high - low, abs(high) * 0.02, 1e-6)
    rough = spread / 3
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * nice for nice in (1, 2, 2.5, 5, 10) if scale * nice >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _svg(inner: str) -> str:
    return f'<svg class="vk-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{TITLE}">{inner}</svg>'


def _grid(marks: list[float], low: float, high: float) -> str:
    digits = 0 if not marks else max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))
    lines = []
    for mark in marks or [low]:
        y = _y(mark, low, high)
        lines.append(f'<line class="vk-grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if marks:
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:.{digits}f}</text>')
    return "".join(lines)


def _x(step: float, first: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)


def _y(loss: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)
