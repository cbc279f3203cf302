"""The image classifier that `hvdtrain.mnist` trains: options, data, model, schedule."""
