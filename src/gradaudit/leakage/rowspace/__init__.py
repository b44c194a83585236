"""Row spaces: which inputs lie in the span of a gradient, and how sentences grow from them."""
