"""Many runs of one command: what is done already, what it will take, each in its own process."""
