"""Results of a row other than `ok`, and faults in the arguments."""


class RowEnd(Exception):
    """A row that ended without being `ok`; `result` is the word that the table prints."""

    result = "FAILED"


class Failed(RowEnd):
    """An outcome is wrong: a program failed, or bare and hooked runs differ."""

    result = "FAILED"


class Missed(RowEnd):
    """The outcome is right and the whole interval of the figure lies beyond its bar."""

    result = "MISSED"


class Noisy(RowEnd):
    """The measurement decides nothing: its interval is too wide, contains the bar, or the baseline is not to be trusted."""

    result = "noisy"


class NotInstalled(RowEnd):
    """No environment has the row's packages."""

    result = "not installed"


class NotHere(RowEnd):
    """The row needs hardware or a build missing here."""

    result = "not here"


class OutOfTime(RowEnd):
    """The time of the whole run was spent before the row's turn."""

    result = "no time"


class ArgumentError(Exception):
    """An argument of the command is wrong; `field` names it."""

    def __init__(self, field, problem):
        super().__init__(f"{field}: {problem}")
        self.field = field
