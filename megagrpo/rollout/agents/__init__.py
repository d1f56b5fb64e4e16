"""Rollouts of several turns, to which an environment replies and gives rewards."""


class UnusableRow(Exception):
    """Raised by an environment for a row that cannot be played, whose rollouts get no reward."""


class Unavailable(Exception):
    """Raised by an environment that lacks a service for now: the rollout begins again a little
    later."""
