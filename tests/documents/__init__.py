"""What the documents claim: the site builds, and their commands run."""
