"""Shows a job to people and machines: texts, a screen, a page, metrics and reports."""
