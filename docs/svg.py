"""A few shapes as SVG text, for the pictures of the documentation.

The pictures are drawn by programs that stand beside them, so that they can be read, changed and
compared; these are the shapes that the programs share. A picture has a light ground of its own,
because pages are read in light and in dark.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, GREY, GROUND, EDGE = "#1f2933", "#616e7c", "#fbfbfd", "#cbd2d9"
SHADE = "#e3f1fa"  # of what belongs to the library
# Told apart by colour-blind eyes (Okabe and Ito), one for each host or kind.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")


class Drawing:
    """Shapes in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{GREY}"/>'
            "</marker></defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
            f'fill="{GROUND}" stroke="{EDGE}"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        colour: str = INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """One line of text, its baseline at y."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" '
            f'font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = GREY
    ) -> None:
        """A rectangle with round corners."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def labelled(
        self, x: float, y: float, width: float, height: float, *lines: str, fill: str = "#ffffff"
    ) -> None:
        """A box whose first line is its name, with what it does below."""
        self.box(x, y, width, height, fill=fill)
        top = y + height / 2 - (len(lines) - 1) * 8 + 5
        for number, line in enumerate(lines):
            self.text(
                x + width / 2,
                top + 16 * number,
                line,
                anchor="middle",
                size=13 if number == 0 else 11,
                bold=number == 0,
                colour=INK if number == 0 else GREY,
            )

    def arrow(self, *points: tuple[float, float], both: bool = False, dashed: bool = False) -> None:
        """A line through these points that ends in a tip."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.4"{dash}{start} '
            'marker-end="url(#tip)"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        colour: str,
        *,
        dash: str = "",
        width: float = 1,
    ) -> None:
        """A straight line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        dashes += f' stroke-width="{width:g}"' if width != 1 else ""
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"{dashes}/>'
        )

    def area(self, points: list[tuple[float, float]], colour: str) -> None:
        """A closed shape."""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "z"
        self.parts.append(f'<path d="{path}" fill="{colour}"/>')

    def whole(self) -> str:
        """The file's text."""
        return "\n".join([*self.parts, "</svg>", ""])
