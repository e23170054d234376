"""From run folders to a comparison. Reads files; imports neither torch nor lightning."""
