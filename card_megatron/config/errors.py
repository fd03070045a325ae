"""The errors that are a user's to act on: shown as one message, without a traceback."""


class CardError(Exception):
    """Something that the message explains completely: the value, the rule and the remedy."""


class ConfigError(CardError, ValueError):
    """A configuration that cannot run."""


class TemporaryRefusal(ConfigError):
    """What may be gone at the next start: a port that is taken, a run directory that is still in use."""


class CheckpointError(CardError):
    """A checkpoint that cannot be written, read or trusted."""


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that may be whole, and cannot be judged here: no permission, or another version's."""


class RunStopped(CardError):
    """A run that ended itself: bad numbers, a loss spike, a save that failed."""
