"""Models as pure functions by parameter name, with the roles of their matrices."""
