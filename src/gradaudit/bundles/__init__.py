"""Update bundles: what a stranger's training sends, saved, checked and attacked without the truth."""
