"""The judge: sees the private batch and the reconstruction together."""
