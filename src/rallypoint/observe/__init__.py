"""What people and machines see of a job: texts, a screen, a page, metrics and reports."""
