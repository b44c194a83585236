"""What leaks of images: matching with priors, likelihoods, posteriors."""
