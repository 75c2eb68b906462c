"""What a page of a report shows, for tests of its numbers."""

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
