"""The image classifier that `hvdtrain.mnist` trains.

`options` has its flags, `models` its networks and the distributed optimizer, `schedule`
its length and learning rates, `description` its texts and summary.json. `experiment`
puts them together: data, specs, callbacks, and the training.
"""
