"""Ids in COCO files, which other tools write as floats."""

from typing import Any

# float64 holds every integer up to here; beyond, two ids may have become one
_LARGEST_EXACT_FLOAT = 2**53


def whole_id(value: Any) -> Any:
    """An id of a JSON file as an integer where it is a whole number, as it is where it is not.

    pandas writes a column of ids as floats (`1.0`) once one of its cells was empty, and pycocotools takes them.
    A float of more than 2 ** 53 is no exact id and stays a float.
    """
    if isinstance(value, float) and abs(value) <= _LARGEST_EXACT_FLOAT and value == int(value):
        return int(value)
    return value
