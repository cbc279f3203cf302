"""What `report.py` prints and draws of runs. Loads no TensorFlow.

Importing `plotting` loads matplotlib, an extra.
"""
