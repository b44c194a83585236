"""A Flower app with two clients, whose updates are recorded."""
