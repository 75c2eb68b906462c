"""Text of users and files in messages."""


def shown(value: str) -> str:
    """Returns a text with its control characters escaped, because a terminal would obey them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in value)


def shown_lines(text: str) -> str:
    """Returns a text of several lines with all other control characters escaped."""
    return "\n".join(map(shown, text.split("\n")))
