"""The rollout service: a supervisor for each engine, which Ray places if there are several machines.

No other package imports ray.
"""
