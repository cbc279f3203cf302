"""What `python -m hvdtrain.launch` does: start a program as the ranks of this host."""
