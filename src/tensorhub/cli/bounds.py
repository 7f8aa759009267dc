"""Numbers that a command takes: its help and its error name the least and the most."""

from typing import Any

import typer


def between(least: float, most: float, *, help: str, show_default: str | bool = True) -> Any:
    """An option for a number of that range, if one is given. Infinity and nan are outside."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"{value} is not from {least:,} to {most:,}")
        return value

    return typer.Option(help=f"{help} From {least:,} to {most:,}.", show_default=show_default, callback=check)
