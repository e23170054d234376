"""One file per part: small additions that any attention with heads can take, alone or together."""
