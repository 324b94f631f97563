"""A job that is taken away as a whole: its workers save, then it ends, and the scheduler may start it again."""
