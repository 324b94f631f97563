"""`rallyctl demo`: a job that loses a worker, then a node, and ends as if nothing had happened.

job         runs launchers, kills, and reports events
worker      the program to train, in plain Python
"""
