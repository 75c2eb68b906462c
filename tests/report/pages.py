"""What a page of a report shows, for tests of its numbers."""

import base64
import hashlib
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """The tables of a page by caption, and all text.

    Attributes:
      tables: By caption, a dict for each row, from its heading to (text, exact numbers).
    """

    def __init__(self, source):
        super().__init__()
        self.tables, self.text, self.cells, self._tag, self._caption = {}, "", None, "", ""
        self.feed(source.decode())

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.cells, self._caption = [], ""
        elif tag == "tr" and self.cells is not None:
            self.cells.append([])
        elif tag in ("th", "td") and self.cells is not None:
            self.cells[-1].append(("", []))
        elif tag == "data" and self.cells:
            self.cells[-1][-1][1].append(float(dict(attributes)["value"]))
        self._tag = tag if tag in ("caption", "th", "td") else self._tag

    def handle_data(self, data):
        self.text += data
        if self._tag == "caption":
            self._caption += data
        elif self._tag in ("th", "td"):
            text, exact = self.cells[-1][-1]
            self.cells[-1][-1] = (text + data, exact)

    def handle_endtag(self, tag):
        if tag == self._tag:
            self._tag = ""
        if tag == "table":
            headings = [text for text, _ in self.cells[0]]
            rows = [dict(zip(headings, row, strict=True)) for row in self.cells[1:]]
            self.tables[self._caption] = rows
            self.cells = None

    def titled(self, start):
        """Returns the rows of the table whose caption starts so."""
        (rows,) = (rows for caption, rows in self.tables.items() if caption.startswith(start))
        return rows


def texts(rows):
    """Returns rows without their exact numbers."""
    return [{heading: text for heading, (text, _) in row.items()} for row in rows]


def allows_only_its_style(text):
    """Tells whether the policy of a page allows its own style and nothing else, and the page asks
    for nothing else."""
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    (style,) = re.findall("<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = ["default-src 'none'", "img-src data:", f"style-src 'sha256-{digest}'"]
    is_first = text.index("Content-Security-Policy") < text.index("<style>")
    return policy.split("; ")[:3] == allowed and is_first and " style=" not in text
