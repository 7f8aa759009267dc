"""Adapters to training and inference engines, each over the public API only.

An adapter imports its engine when it is used, never before, and may not reach past what any user can call.
"""
