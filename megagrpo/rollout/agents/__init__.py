"""Rollouts of several turns, which an environment answers and rewards."""


class UnusableRow(Exception):
    """Raised by an environment for a row of the data that cannot be played: its rollouts have no
    reward."""


class Unavailable(Exception):
    """Raised by an environment that lacks a service at present: the rollout begins again a little
    later."""
