"""The agent program `harbor`: the model works on a task in the format of Harbor and terminal-bench 2.

`program.py` is the agent, and prints the rows of a folder of tasks. `local.py` runs commands on this
machine. `hosted.py` runs them at a provider, in the interpreter that has Harbor's package.
"""
