"""The one exception that a user is meant to read."""


class UserError(Exception):
    """A mistake of the user's, told in one line: the key or file, what was found, what is allowed.

    The entry points print the line on standard error and end with exit status 2.
    """
