"""SHOWS: the command line. Commands load what they need when called; what they print is drawn by pure functions.

It decides nothing: a command that knows better than the layers below is in the wrong folder.
"""
