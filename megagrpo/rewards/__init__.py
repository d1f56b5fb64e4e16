"""Graders and the killable processes that run them.

An outcome is a score, an error or a timeout; the last two are never counted as 0.
"""
