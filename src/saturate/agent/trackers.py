"""Placeholder."""


def callbacks():
    return {}
