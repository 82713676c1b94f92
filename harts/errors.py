"""Errors a user can act on: each message says what was expected, what came, where, what to do."""


class HartsError(Exception):
    """Base of every error HARTS raises on purpose; the command line prints it and exits 2."""


class InputError(HartsError):
    """Trajectories, a configuration or a file that does not follow its contract."""


class PlanError(HartsError):
    """A plan that cannot be made for these trajectories, or a loaded plan that is not valid."""


class UnsupportedError(HartsError):
    """A model, setting or environment outside what HARTS supports."""
