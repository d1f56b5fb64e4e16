"""Why an experiment may not run: all rules that join two sections, the model or the machine.

A rule about the values of one section is in its `Section.problems`; every other one is here, in the
file of its subject, and table.py says when it is judged.
"""
