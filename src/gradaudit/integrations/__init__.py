"""Updates recorded inside other frameworks, as bundles."""
