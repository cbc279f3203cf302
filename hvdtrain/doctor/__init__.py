"""Checks of the installation, the machine, the cluster and two ranks.

A check is a function that returns a list of `Finding`s. It raises nothing: a failure
of the check is a finding, too. `__main__` runs them and prints the page.
"""
