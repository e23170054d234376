"""The commands other than training, each installed as gptattn-NAME."""
