"""A third kind of data: rows of numbers and a linear classifier of them, in six files and no edit elsewhere."""
