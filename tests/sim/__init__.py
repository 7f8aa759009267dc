"""A whole cluster in one process: the real machines of `core` on virtual time, in weather that is drawn from a seed.

First a storm, then calm, then everybody must have got where he wanted; every promise is checked after every event. A
seed is a history: the same on every machine. Nothing here may look at a real clock or be imported by the product.
"""
