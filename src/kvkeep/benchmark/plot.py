"""Time per step and bytes of the cache over the context, as an SVG: a pair of panels for every batch.

The two questions of KVpop's figure 4 (arXiv 2607.05061). Both axes are logarithmic. Reads rows only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

WIDTH, HEIGHT = 330, 220  # of a panel's frame
LEFT, TOP, GAP, LINE = 64, 58, 92, 17
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
PANELS = (("ms_median", "ms per step"), ("kv_bytes", "cache, MB"))

TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="white"/>
<text x="{{ left }}" y="20" font-size="13" font-weight="bold">{{ title }}</text>
{% for panel in panels %}<g transform="translate({{ panel.x }} {{ panel.y }})">
<text x="0" y="-8" font-weight="bold">{{ panel.title }}</text>
{% for tick in panel.y_ticks %}<line x2="{{ w }}" y1="{{ tick.at }}" y2="{{ tick.at }}" stroke="#ddd"/>
<text x="-6" y="{{ tick.at + 4 }}" text-anchor="end">{{ tick.text }}</text>
{% endfor %}{% for tick in panel.x_ticks %}<line x1="{{ tick.at }}" x2="{{ tick.at }}" y2="{{ h }}" stroke="#eee"/>
<text x="{{ tick.at }}" y="{{ h + 15 }}" text-anchor="middle">{{ tick.text }}</text>
{% endfor %}<rect width="{{ w }}" height="{{ h }}" fill="none" stroke="#888"/>
<text x="{{ w / 2 }}" y="{{ h + 30 }}" text-anchor="middle">tokens of context</text>
{% for line in panel.lines %}<polyline points="{{ line.points }}" fill="none" stroke="{{ line.colour }}"\
 stroke-width="1.8"{% if line.dashed %} stroke-dasharray="5 3"{% endif %}/>
{% for x, y in line.dots %}<circle cx="{{ x }}" cy="{{ y }}" r="2.4" fill="{{ line.colour }}"/>
{% endfor %}{% endfor %}</g>
{% endfor %}{% for name in names %}<g transform="translate({{ legend }} {{ top + 17 * loop.index0 }})">
<line x2="18" y1="0" y2="0" stroke="{{ name.colour }}" stroke-width="2.5"\
{% if name.dashed %} stroke-dasharray="5 3"{% endif %}/>
<text x="24" y="4">{{ name.text }}</text></g>
{% endfor %}</svg>
"""


def check(path: Path, what: Sequence[str], contexts: Sequence[int]) -> None:
    """Raise ValueError, before anything is measured, for a plot in another format or of nothing."""
    if path.suffix.lower() != ".svg":
        raise ValueError(f"--plot writes SVG: name a file that ends with .svg, not {path}")
    if "decode" not in what or len(set(contexts)) < 2:
        raise ValueError("a plot is over the context: measure decode at two lengths or more")


def svg(result: Mapping[str, Any]) -> str:
    """The decode rows of a result, of two contexts or more, as a picture."""
    rows = [row for row in result["rows"] if row["what"] == "decode"]
    contexts = sorted({row["context"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    styles = {
        name: {"text": name, "colour": COLOURS[place % len(COLOURS)], "dashed": place >= len(COLOURS)}
        for place, name in enumerate(policies)
    }
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    panels = []
    for place, batch in enumerate(batches):
        for column, (key, label) in enumerate(PANELS):
            some = [row for row in rows if row["batch"] == batch]
            panel = _panel(some, key, contexts, styles)
            panel |= {"x": LEFT + column * (WIDTH + GAP), "y": TOP + place * (HEIGHT + GAP)}
            panels.append(panel | {"title": f"{label}, batch {batch}"})
    settings = result["settings"]
    legend = LEFT + len(PANELS) * (WIDTH + GAP) - GAP + 24
    return (
        Environment(autoescape=True)
        .from_string(TEMPLATE)
        .render(
            width=legend + 150,
            height=max(TOP + len(batches) * (HEIGHT + GAP) - GAP + 44, TOP + LINE * len(policies)),
            left=LEFT,
            top=TOP + 10,
            w=WIDTH,
            h=HEIGHT,
            legend=legend,
            title=f"{settings['model']}, {settings['dtype']}, {settings['device']}, budget {settings['budget']}",
            panels=panels,
            names=styles.values(),
        )
    )


def _panel(rows: Sequence[Mapping[str, Any]], key: str, contexts: Sequence[int], styles: Mapping[str, dict]) -> dict:
    factor = 1e-6 if key == "kv_bytes" else 1.0
    values = [row[key] * factor for row in rows]
    low, high = min(values) / 1.15, max(values) * 1.15
    lines = []
    for name, style in styles.items():
        points = sorted((row["context"], row[key] * factor) for row in rows if row["policy"] == name)
        dots = [(_place(x, contexts[0], contexts[-1], WIDTH), HEIGHT - _place(y, low, high, HEIGHT)) for x, y in points]
        lines.append(style | {"dots": dots, "points": " ".join(f"{x},{y}" for x, y in dots)})
    return {
        "lines": lines,
        "x_ticks": [{"at": _place(x, contexts[0], contexts[-1], WIDTH), "text": _short(x)} for x in contexts],
        "y_ticks": [{"at": HEIGHT - _place(y, low, high, HEIGHT), "text": f"{y:g}"} for y in _ticks(low, high)],
    }


def _place(value: float, low: float, high: float, size: int) -> float:
    """Where a value lies on a logarithmic axis of ``size`` pixels."""
    return round(size * math.log(value / low) / math.log(high / low), 1)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the ends."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
