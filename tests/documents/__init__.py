"""Claims of the documents: the site builds, and the commands run."""
