"""The promises, each asked of the truth whenever something happens that could break it.

A judge is never excused by what the core believes: only by the truth of who was dead, cut off, slow or late.
"""
