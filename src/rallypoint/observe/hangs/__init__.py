"""Evidence of a hang: what each rank does when none makes progress, collected, grouped and described."""
