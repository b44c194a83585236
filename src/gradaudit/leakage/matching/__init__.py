"""Matching: guesses whose own update comes near to the one that was seen."""
