"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """A user's mistake, told in one clear paragraph that names key, value, rule and fix.

    The command line prints the message without a traceback and exits with code 2. Anything else that is raised is
    a bug of ours and keeps its traceback.
    """
