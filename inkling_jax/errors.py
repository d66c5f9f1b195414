"""What this package raises when a checkpoint or its config is not what it should be."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, tensor or field and what was expected."""


class ConfigError(CheckpointError):
    """A field of a model config has a value that this package cannot build."""
