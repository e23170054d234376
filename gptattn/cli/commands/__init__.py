"""The commands besides training, each of them gptattn-NAME."""
