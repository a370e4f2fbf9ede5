"""The one exception that a user is meant to read."""


class UserError(Exception):
    """A mistake of the user's, told in one line: the key or file, what was found, what is allowed.

    The entry points print the line on standard error and end with exit status 2.
    """


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """UserError unless value is a whole number (no boolean) from low to high."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{name}={value!r} is not a whole number {allowed}")
