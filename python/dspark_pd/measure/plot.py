"""Accept length by step as an SVG: a few lines over steps, nothing to install."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

Line = Mapping[str, float]
"""Accept length by the name of the step, in order."""

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 44, 64
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
_DASHES: Final = ("none", "6 3", "2 3", "8 3 2 3", "1 2")


def draw(lines: Mapping[str, Line], title: str, source: str = "") -> str:
    """An SVG document; ``source`` goes into its description.

    Raises ValueError when there is nothing to draw.
    """
    names = list(dict.fromkeys(step for line in lines.values() for step in line))
    if not names:
        raise ValueError("no steps were measured")
    top = max(max(line.values()) for line in lines.values() if line)
    ceiling = int(top) + 1
    across = (_WIDTH - _LEFT - _RIGHT) / max(len(names) - 1, 1)
    up = (_HEIGHT - _TOP - _BOTTOM) / ceiling
    places = {name: _LEFT + across * n for n, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<desc>{escape(source)}</desc>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle"),
        *_axes(ceiling, up, places),
    ]
    for number, (name, line) in enumerate(lines.items()):
        points = [
            (places[step], _HEIGHT - _BOTTOM - up * y) for step, y in line.items()
        ]
        parts += _line(number, name, points)
    return "\n".join([*parts, "</svg>", ""])


def _axes(ceiling: int, up: float, places: Mapping[str, float]) -> list[str]:
    floor = _HEIGHT - _BOTTOM
    parts = [
        _text(_WIDTH / 2, floor + 36, "verify step after the handoff", "middle"),
        _text(_LEFT - 40, _TOP - 12, "accept length", "start"),
    ]
    for value in range(ceiling + 1):
        y = floor - up * value
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
            + _text(_LEFT - 8, y + 4, str(value), "end")
        )
    return parts + [_text(x, floor + 18, name, "middle") for name, x in places.items()]


def _line(number: int, name: str, points: list[tuple[float, float]]) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number % len(_DASHES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    at = _LEFT + 150 * number
    return [
        f'<polyline points="{path}" {style}/>',
        f'<g fill="{colour}">{"".join(dots)}</g>',
        f'<path d="M{at} {_HEIGHT - 12}h24" {style}/>',
        _text(at + 30, _HEIGHT - 8, name, "start"),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
