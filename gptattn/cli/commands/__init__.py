"""What the commands of the wheel do, beside training and comparing; scripts/ has a door to each."""
