"""The mathematics of leakage: pure functions, no attack in them."""
