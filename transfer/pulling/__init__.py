"""What a pull is made of: writing a tree, staging it, resuming. `transfer.pull` is the whole."""
