"""TOUCHES TENSORS: the user's tensors as one stream of bytes, its digests, and checks of the bytes that are received.

Here torch and numpy are known, and nowhere below; neither is imported before the user passes one of its tensors.
Nothing here talks to peers or knows what a version is.
"""
