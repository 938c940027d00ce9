"""How the learning rate changes between epochs."""

from lm.config.groups import OptimConfig, Schedule


def learning_rate(config: OptimConfig, *, epoch: int, max_epochs: int | None) -> float:
    """The learning rate of an epoch, counted from 0."""
    if config.schedule is Schedule.constant:
        return config.lr
    assert max_epochs is not None
    # Halved after each epoch from the middle one on: of 10 epochs, the sixth is the first to be halved.
    return config.lr * 0.5 ** max(0, epoch + 1 - -(-max_epochs // 2))
