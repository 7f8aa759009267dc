"""Sums by name, of which only the latest few are kept apart: for reports and tables that must not grow."""

from .messages import OTHERS


def add_up(table: dict[str, int], name: str, amount: int, *, most: int) -> None:
    """Count the amount under that name. Beyond `most` names, those not heard of for longest become one sum."""
    table[name] = table.pop(name, 0) + amount
    named = [each for each in table if each != OTHERS]
    for each in named[: max(0, len(named) - most)]:
        table[OTHERS] = table.get(OTHERS, 0) + table.pop(each)
