"""Evidence of a hang: what each rank is doing when none makes progress, collected, grouped and described."""
