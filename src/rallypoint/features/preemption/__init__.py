"""Preempts a whole job: its workers save, then it ends, and the scheduler may start it again."""
