"""Shows a job to people and programs: texts, a screen, a page, metrics and reports."""
