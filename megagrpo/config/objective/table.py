"""Checks that a table of functions has one row for every variant that a configuration offers."""

from collections.abc import Iterable, Mapping


def check_complete(
    table: Mapping[type, object], variants: Iterable[type], table_name: str, union_name: str
) -> None:
    """Raises ImportError, naming what is missing, unless every variant has a row in the table and
    every row a variant.

    Called when the module of the table is imported, so that a choice without a function fails
    before any run.
    """
    offered = tuple(variants)
    without_row = [variant.__name__ for variant in offered if variant not in table]
    if without_row:
        raise ImportError(
            f"{union_name} offers {', '.join(without_row)}, which {table_name} has no function for"
        )
    not_offered = [variant.__name__ for variant in table if variant not in offered]
    if not_offered:
        raise ImportError(
            f"{table_name} has a row for {', '.join(not_offered)}, which "
            f"{union_name} does not offer"
        )
