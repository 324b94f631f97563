"""`rallyctl demo`: a job that loses a worker, then a node, and ends as if nothing had happened.

job         runs launchers, kills, and says what happens
worker      the program that is trained, in plain Python
"""
