"""A prompt's attention weights, to be looked at: a picture per layer, and one page."""
