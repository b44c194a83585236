"""What a learned attack is made of: hashed features, the network, its training, and the inverter on disk."""
