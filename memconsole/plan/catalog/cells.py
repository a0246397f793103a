"""What separates the cells of a CSV or TSV table."""

from __future__ import annotations


def separator(suffix: str, header: str) -> str:
    """The separator of a table with this suffix and header: a tab in .tsv; in .csv a comma, or a semicolon or tab if the
    header has no comma."""
    if suffix == ".tsv":
        return "\t"
    return next((sign for sign in ",;\t" if sign in header), ",")
