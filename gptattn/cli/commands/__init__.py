"""The commands besides training; scripts/ has a file to call each of them without an install."""
