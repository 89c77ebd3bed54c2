"""Paths as values on the command line of a tool, for those that start one."""

import re

# Hydra reads these as they are: with a slash nothing is a number
_PLAIN = re.compile(r"[A-Za-z0-9_./-]*/[A-Za-z0-9_./-]*|[A-Za-z_][A-Za-z0-9_.-]*")
_NO_TEXT = frozenset({"null", "true", "false", "nan", "inf"})


def quoted_value(text: str) -> str:
    """What stands for `text` behind the `=` of a key, in a list too.

    Hydra would take a comma, a bracket, a space at the end, a letter beyond ASCII or `1e5` for something else. A plain
    text stays as it is; `${...}` remains an interpolation.
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT:
        return text
    # backslashes stand for themselves but before a quote
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"
