"""Evidence of a hang: what each rank does when none of them comes further, collected, grouped and put into words."""
