"""The mathematics: pure functions on tensors. A reduction over ranks is passed in as a callable.

advantage  the order of operations from rewards to advantages    loss         the objective of a
micro-batch estimators, policy_loss, reward_shaping: one function and one row for every variant of
config/
"""
