"""Checking a final answer against the right one: extract, normalise, compare.

``extract`` finds the answer in a completion, ``compare`` decides what text, exact numbers, structure and sampled values
can decide, and ``symbolic`` asks math-verify about the rest, in a process that can be killed.
"""
