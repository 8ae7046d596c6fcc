"""What the pictures of a run have in common: frame, colours, text.

The colours are of Okabe and Ito's palette, which colour-blind people can tell apart. They are plain attributes; one
style block replaces the few that must differ on a dark page.
"""

from collections.abc import Iterable
from html import escape

WIDTH = 900

FORWARD, BACKWARD, OTHER, SIDE, OVERRUN = "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00"
STYLE = """
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d } .ink { fill: #e6edf3 } .soft { fill: #9198a1 }
    .grid { stroke: #262c36 } .track { fill: #161b22 } .hatch { fill: #21262d } .line { stroke: #6e7681 }
    .forward { fill: #3d9bd9 } .side { fill: #1fb88a } .on-forward { fill: #04121d }
  }
"""


def rect(x: float, y: float, width: float, height: float, fill: str, css: str = "", rounded: float = 0) -> str:
    """A rectangle, in pixels."""
    more = (f' class="{css}"' if css else "") + (f' rx="{rounded:g}"' if rounded else "")
    return f'<rect{more} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"/>'


def text(x: float, y: float, words: str, size: int = 12, css: str = "ink", more: str = "") -> str:
    """A line of text; `more` are further attributes."""
    fill = {"ink": "#1f2328", "soft": "#59636e", "on-forward": "#ffffff"}.get(css, "#1f2328")
    return f'<text class="{css}" x="{x:.2f}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(words)}</text>'


def document(title: str, about: str, height: float, parts: Iterable[str], definitions: str = "") -> str:
    """The whole file: a card with a title and a line about it, and `parts` in it."""
    around = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        'role="img" aria-labelledby="title about">',
        f'<title id="title">{escape(title)}</title><desc id="about">{escape(about)}</desc>',
        f"<style>{STYLE}</style>\n<defs>{definitions}</defs>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="#ffffff" '
        'stroke="#d1d9e0"/>',
        text(24, 32, title, 16, more=' font-weight="600"'),
        text(24, 53, about, 12, "soft"),
    ]
    return "\n".join([*around, *parts, "</svg>\n"])
