"""Draws boxes, arrows and text as SVG, readable on light and dark pages."""

from dataclasses import dataclass, field
from html import escape

INK, QUIET, PAPER, LINE = "#1f2328", "#59636e", "#ffffff", "#8c959f"
BLUE, GREEN, RED, GREY = "#0969da", "#1a7f37", "#cf222e", "#d0d7de"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_LINE_HEIGHT = 1.3


@dataclass(slots=True)
class Drawing:
    """A picture of ``width`` x ``height`` pixels. Positions are in pixels from its corner."""

    width: int
    height: int
    #: Text for people who do not see the picture.
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = PAPER,
        line: str = LINE,
        dashed: bool = False,
        round_px: float = 6,
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_px:g}" '
            f'fill="{fill}" stroke="{line}" stroke-width="1.5"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        lines: str,
        *,
        size: float = 14,
        bold: bool = False,
        fill: str = INK,
        anchor: str = "start",
    ) -> None:
        """Write lines of text. ``y`` is the baseline of the first line."""
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(lines.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * size * _LINE_HEIGHT:g}" font-size="{size:g}" '
                f'fill="{fill}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, *, both: bool = False, line: str = INK
    ) -> None:
        """Draw an arrow to (x2, y2). With ``both``, it also has a head at (x1, y1)."""
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{line}" '
            f'stroke-width="1.5" marker-end="url(#head)"{start}/>'
        )

    def __str__(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" font-family="{_FONT}">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
