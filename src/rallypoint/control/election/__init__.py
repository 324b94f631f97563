"""The election on etcd: it chooses the agent that coordinates the job, hands over the state, and announces the
address.
"""
