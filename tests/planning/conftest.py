"""Settings of the planning tests."""

from hypothesis import settings

# Exhaustive oracles are slow for some examples, and the machine may be busy: time proves nothing.
settings.register_profile("oracles", deadline=None)
settings.load_profile("oracles")
