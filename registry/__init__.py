"""The parts that people swap: weight formats, noise schedules, rewards and prompt sources.

Nothing here knows the training system; a component is a plain class with a cheap constructor, registered by a short
name beside its definition.
"""
