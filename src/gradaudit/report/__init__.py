"""The report: one offline HTML file made from a run's folder, with a verdict and the rule behind it."""
