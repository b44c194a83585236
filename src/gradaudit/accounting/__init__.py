"""What a declared privacy mechanism supports in theory, apart from what attacks recover."""
