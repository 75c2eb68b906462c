"""JSON files of a workdir whose values are forged, one after the other."""

import json


def forgeries(path, forged):
    """Replaces each value of a JSON file alone. Yields its place and the value that it had.

    The file is as before at the end.
    """
    text = path.read_text()
    for place, value in leaves(json.loads(text)):
        found = json.loads(text)
        put(found, place, forged)
        path.write_text(json.dumps(found))
        yield place, value
    path.write_text(text)


def leaves(value, path=()):
    """Returns the (path, value) pairs of all values in nested lists and dicts."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, inner in items for found in leaves(inner, (*path, key))]
    return [(path, value)]


def put(value, path, new):
    """Replaces the value at a path."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new
