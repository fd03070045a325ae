"""The one error that a user's configuration can cause."""


class ConfigError(ValueError):
    """A configuration that cannot run: the message says the value, the rule and the remedy."""
