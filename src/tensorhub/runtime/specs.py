"""What callers and their texts mean by a version, as the plain int or str that travels.

Numbers of steps come out of numpy, and names out of enums. What is an integer or a text counts as one; anything else is
left as it is, for `core.version_spec` to refuse.
"""

from numbers import Integral

from ..core.errors import UsageError
from ..core.messages import Spec
from ..core.names import Version, plain, plain_number
from ..core.version_spec import parse_spec

MOST_DIGITS = 100  # of a text that is looked at as a number: Python itself refuses thousands


def plain_spec(spec: Spec) -> Spec:
    """A spec as nothing but an int or a str, where it is one by another name (numpy.int64, numpy.str_, an enum's)."""
    given = plain_number(spec)
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    return plain(given) if isinstance(given, str) else spec


def parse_number(version: Spec, what: str) -> Version:
    """The version that is named by its number. Raises `UsageError` that says what needs one."""
    named = plain_spec(version)
    found = parse_spec(named) if isinstance(named, int) and not isinstance(named, bool) else None
    if found is None:
        raise UsageError(f"{what} needs a version number, not {version!r}", hint="an integer, such as 7")
    return found


def spec_of_text(text: str) -> Spec:
    """A spec as it stands in an address or a reference. Raises `UsageError`."""
    spec: Spec = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else text
    parse_spec(spec)
    return spec
