"""One paper, one file, whatever axis it fills."""
