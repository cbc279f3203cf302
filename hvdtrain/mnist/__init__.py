"""The image classifier that `hvdtrain.mnist` trains.

`experiment` trains it: data, model, distributed optimizer, callbacks. `options` has its
flags, `models` its networks, `schedule` its length and learning rates, `summary` its
texts and summary.json.
"""
