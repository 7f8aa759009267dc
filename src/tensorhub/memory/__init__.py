"""TOUCHES TENSORS: the user's tensors as one stream of bytes, its digests, and the judge of what is received into it.

Here torch and numpy are known, and nowhere below; neither is imported before the user passes one of its tensors.
Nothing here talks to peers or knows what a version is.
"""
