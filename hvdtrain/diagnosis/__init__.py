"""What can be wrong with an installation, a machine, a cluster; one module for each.

A check is a function that returns a list of `Finding`s and raises nothing: what it
cannot find out is a finding too. `hvdtrain.doctor` runs them and prints the page.
"""
