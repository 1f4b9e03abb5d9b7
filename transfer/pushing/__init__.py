"""What a push is made of: reading a directory, cutting, packing. `transfer.push` is the whole."""
