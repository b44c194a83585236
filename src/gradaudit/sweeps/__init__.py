"""Many cases along axes, what their defenses cost, and both together."""
