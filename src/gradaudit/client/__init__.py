"""The client: a private batch goes in, an update comes out."""
